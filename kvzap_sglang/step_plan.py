"""What the CPU decides about a step before it is launched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvzap_sglang.memory.row_state import RowState
from kvzap_sglang.radix_cache import KVPressRadixCache


class RowPlan(NamedTuple):
    """One request's part of a step.

    row: its `req_to_token` row. start, end: the positions the step computes.
    dense_end: query positions below it see the request's own positions densely (prompt tokens of a
    dense prefill); the others follow the decode rule.
    hit: cached prefix length at admission.
    """

    row: int
    start: int
    end: int
    dense_end: int
    hit: int
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

    def __init__(self, tree: KVPressRadixCache, window: int, sparse_prefill: bool, result_lag: int) -> None:
        """`result_lag`: steps that may be launched for a request before it is known to have finished."""
        self._tree = tree
        self._window = window
        self._sparse = sparse_prefill
        self._result_lag = result_lag
        self._steps = 0

    def plan(self, batch: Any) -> StepPlan:
        """Plan `batch` (an SGLang `ScheduleBatch` about to run) and debit the ledger."""
        self._steps += 1
        decode = batch.forward_mode.is_decode()
        plan = StepPlan(self._steps, is_decode=decode)
        for index, req in enumerate(batch.reqs):
            if decode:
                end = int(batch.seq_lens_cpu[index])
                start, last_chunk = end - 1, True
            else:
                start = batch.prefix_lens[index]
                end = start + batch.extend_lens[index]
                last_chunk = end >= len(req.full_untruncated_fill_ids)
            self._plan_row(plan, req, start, end, last_chunk)
        allocator = self._tree.token_to_kv_pool_allocator
        allocator.ledger.launch(plan.step, allocator.cells_for(plan.tokens))
        return plan

    def _plan_row(self, plan: StepPlan, req: Any, start: int, end: int, last_chunk: bool) -> None:
        row = req.kv.req_pool_idx
        if row is None:
            raise RuntimeError(f"kv press: request {req.rid} is launched without a row")
        state = self._tree.rows.get(row)
        if state is None:
            state = RowState(start, len(req.origin_input_ids), self._tree.cells_per_token)
            self._tree.rows[row] = state
        state.launch(end)
        dense_end = 0 if self._sparse else state.prompt_end
        plan.rows.append(RowPlan(row, start, end, dense_end, state.hit, state))
        if last_chunk or self._sparse:
            # A step launched past a request's end must not settle into the window that its next turn
            # will find: decode frees that much later than it could. Visibility does not depend on it.
            overrun = min(self._result_lag, max(0, end - len(req.origin_input_ids)))
            ranges = self._settle(state, req, end - overrun - self._window)
            plan.settle.extend(SettleRange(row, low, high) for low, high in ranges)

    def _settle(self, state: RowState, req: Any, limit: int) -> list[tuple[int, int]]:
        """Settle what leaves the window with this step: positions `[cursor, limit)`."""
        if limit <= state.cursor:
            return []
        owned_by_tree = req.kv.cache_protected_len
        ranges = []
        if state.cursor < owned_by_tree:
            settled = self._tree.settle_path(state, req.last_node, owned_by_tree, state.cursor, limit)
            ranges = [(part.start, part.end) for part in settled]
        low = max(state.cursor, owned_by_tree)
        if low < limit:
            state.settle(low, limit)
            ranges.append((low, limit))
        state.cursor = limit
        return ranges
