"""What the CPU decides about a step before it is launched."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kvzap_sglang.memory.row_state import RowState
from kvzap_sglang.radix_cache import KVPressRadixCache
from kvzap_sglang.request_options import parse_options
from kvzap_sglang.sharing.settling import Reaches


class RowPlan(NamedTuple):
    """One request's part of a step.

    row: its `req_to_token` row. start, end: the positions the step computes.
    dense_end: query positions below it see the request's own positions densely (prompt tokens of a
    dense prefill); the others follow the decode rule. prune_end: positions from it on are kept whatever
    they score.
    hit: cached prefix length at admission. threshold: the request's.
    reused: int64 slots of the tree's own tokens at `start`, `start + 1`, ...: these are recomputed.
    """

    row: int
    start: int
    end: int
    dense_end: int
    prune_end: int
    hit: int
    threshold: float
    reused: torch.Tensor
    state: RowState


class SettleRange(NamedTuple):
    """Positions `[start, end)` of a row whose condemned cells go after the step's attention."""

    row: int
    start: int
    end: int


@dataclass
class StepPlan:
    """A step as the scheduler launched it. `is_decode`: every row computes exactly one position."""

    step: int
    is_decode: bool
    rows: list[RowPlan] = field(default_factory=list)
    settle: list[SettleRange] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(row.end - row.start for row in self.rows)


class StepPlanner:
    """Turns a scheduled batch into a `StepPlan`, updating rows, tree and ledger."""

    def __init__(self, tree: KVPressRadixCache, result_lag: int) -> None:
        """`result_lag`: steps that may be launched for a request before it is known to have finished."""
        self._tree = tree
        self._result_lag = result_lag
        self._steps = 0

    def plan(self, batch: Any) -> StepPlan:
        """Plan `batch` (an SGLang `ScheduleBatch` about to run) and debit the ledger."""
        self._steps += 1
        decode = batch.forward_mode.is_decode()
        plan = StepPlan(self._steps, is_decode=decode)
        settling: list[tuple[RowPlan, Any]] = []
        for index, req in enumerate(batch.reqs):
            if decode:
                end = int(batch.seq_lens_cpu[index])
                start, last_chunk = end - 1, True
            else:
                start = batch.prefix_lens[index]
                end = start + batch.extend_lens[index]
                last_chunk = end >= len(req.full_untruncated_fill_ids)
            row = self._plan_row(req, start, end)
            plan.rows.append(row)
            if (last_chunk or self._tree.sparse_prefill) and row.threshold != -math.inf:
                settling.append((row, req))
        self._settle(plan, settling)
        allocator = self._tree.token_to_kv_pool_allocator
        allocator.ledger.launch(plan.step, allocator.cells_for(plan.tokens))
        return plan

    def _plan_row(self, req: Any, start: int, end: int) -> RowPlan:
        row = req.kv.req_pool_idx
        if row is None:
            raise RuntimeError(f"kv press: request {req.rid} is launched without a row")
        state = self._tree.rows.get(row)
        if state is None:
            state = self._tree.rows[row] = self._admit(req, start)
        state.launch(end)
        state.node = req.last_node
        dense_end = 0 if self._tree.sparse_prefill else state.prompt_end
        prune_end = end if self._tree.prunes_generated else state.prompt_end
        reused = state.reused[max(0, start - state.hit) : end - state.hit]
        return RowPlan(row, start, end, dense_end, prune_end, state.hit, state.threshold, reused, state)

    def _admit(self, req: Any, hit: int) -> RowState:
        """The row of a request launched for the first time."""
        tree = self._tree
        threshold = parse_options(req.sampling_params.custom_params).threshold_for(tree.config)
        state = RowState(hit, len(req.origin_input_ids), tree.shape, threshold, tree.window)
        if tree.disable:
            return state
        slots = tree.path_device_indices(req.last_node)[hit:]
        if len(slots):
            state.heal(slots.to(torch.int64), tree.window)
            tree.recomputed_tokens += len(slots)
        return state

    def _settle(self, plan: StepPlan, settling: list[tuple[RowPlan, Any]]) -> None:
        """Settle what leaves a window with this step: positions `[cursor, limit)` of each row.

        Every row's reach is known before any shared token is settled.
        """
        for row, _ in settling:
            # The window of this step's last query stays: who sends the same tokens again computes the last of them
            # anew. A step launched past a request's end must not settle into the window that its next turn will
            # find. So cells go a step or two later than they could; visibility does not depend on it.
            overrun = min(self._result_lag, max(0, row.end - row.state.prompt_end))
            row.state.reach = row.end - 1 - overrun - self._tree.window
        reaches = Reaches(self._tree)
        for row, req in settling:
            ranges = self._settle_row(row.state, req.kv.cache_protected_len, reaches)
            plan.settle.extend(SettleRange(row.row, start, end) for start, end in ranges)

    def _settle_row(self, state: RowState, owned_by_tree: int, reaches: Reaches) -> Iterator[tuple[int, int]]:
        limit = state.reach
        if limit <= state.cursor:
            return
        if state.cursor < owned_by_tree:
            yield from self._tree.settler.pass_window(state, state.cursor, min(limit, owned_by_tree), reaches)
        low = max(state.cursor, owned_by_tree)
        # What is recomputed for the tree stays whole until the tree has it.
        for start, end in ((low, min(limit, state.heal_start)), (max(low, state.heal_end), limit)):
            if start < end:
                state.settle(start, end)
                yield start, end
        state.cursor = limit
