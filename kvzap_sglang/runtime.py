"""What happens around one forward: drain, pop, score and condemn per layer, settle, report.

All of it runs on the forward stream, in this order, so that a cell freed by one step can be
popped by the next without waiting for the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kvzap_sglang.config import KVPressConfig
from kvzap_sglang.kernels.bits import pack_bits
from kvzap_sglang.memory.allocator import KVPressAllocator
from kvzap_sglang.memory.head_token_sets import BitArray, count_bits
from kvzap_sglang.presses.base import LayerInput, Press
from kvzap_sglang.radix_cache import KVPressRadixCache
from kvzap_sglang.ranks import GatherDecisions, own_decisions
from kvzap_sglang.sharing.reused_tokens import NO_REUSE, ReusedTokens
from kvzap_sglang.step_plan import StepPlan, StepPlanner

# Settled ranges from this length on are compacted: below it a copy costs more than it saves.
COMPACT_FROM_TOKENS = 64


class StepDecisions:
    """A step's decisions on their way to the CPU (SGLang's `DeviceAuxiliaryOutput` protocol).

    Attributes:
        plan: the step. free_cells: free cells after it, on the rank that has fewest.
    """

    def __init__(self, plan: StepPlan, packed: torch.Tensor, free_cells: int) -> None:
        """packed: uint8 `[tokens, ranks, bytes]` kept bits of the step's tokens, in row order."""
        self.plan = plan
        self.free_cells = free_cells
        self._device_packed = packed
        self._host_packed: torch.Tensor | None = None

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> StepDecisions:
        """Start the copy (`DeviceAuxiliaryOutput`); called once, on the copy stream."""
        if self._host_packed is None:
            self._host_packed = copy_tensor(self._device_packed)
        return self

    def consume(self, batch: Any, commits: Any) -> None:
        """Nothing left to do (`HostAuxiliaryOutput`): decisions are applied before the batch is processed."""

    def packed(self) -> BitArray:
        """The kept bits on the host; waits for a copy that nobody started (prefill-only batches)."""
        source = self._device_packed if self._host_packed is None else self._host_packed
        return source.cpu().numpy()


def score_limits(plan: StepPlan, device: torch.device) -> torch.Tensor | float:
    """Below what score a step's tokens are condemned: one number, or fp32 `[tokens, 1]` when rows differ."""
    limits = {row.threshold for row in plan.rows}
    if len(limits) == 1:
        return limits.pop()
    lengths = torch.tensor([row.end - row.start for row in plan.rows], dtype=torch.int64)
    values = torch.tensor([row.threshold for row in plan.rows], dtype=torch.float32)
    return values.repeat_interleave(lengths).to(device)[:, None]


class KVPressRuntime:
    """One scheduler process' press: owns the order of events around each forward.

    Attributes:
        plan: the step being run, None between steps.
        kept: bool `[tokens, layers, heads]` of the step being run, filled layer by layer.
        window: positions that are never pruned.
    """

    def __init__(
        self,
        press: Press,
        allocator: KVPressAllocator,
        req_to_token: torch.Tensor,
        config: KVPressConfig,
        *,
        result_lag: int,
        gather: GatherDecisions = own_decisions,
    ) -> None:
        """`result_lag`: steps that may be launched before a step's result is processed."""
        self.press = press
        self.allocator = allocator
        self.cells = allocator.cells
        self.sinks, self.window = config.sinks, config.kv_press_window
        self.result_lag = result_lag
        self._gather = gather
        self._limits: torch.Tensor | float = -math.inf
        self._reused = NO_REUSE
        self.plan: StepPlan | None = None
        self.kept: torch.Tensor | None = None
        self._decisions: StepDecisions | None = None
        self._slots: torch.Tensor | None = None
        self._req_to_token = req_to_token
        self._tree: KVPressRadixCache | None = None
        self._planner: StepPlanner | None = None

    @property
    def tree(self) -> KVPressRadixCache:
        if self._tree is None:
            raise RuntimeError("kv press: the radix cache is not built yet")
        return self._tree

    def attach_tree(self, tree: KVPressRadixCache) -> None:
        """The scheduler built its tree: from here on steps can be planned."""
        self._tree = tree
        self._planner = StepPlanner(tree, self.result_lag)

    # -- scheduler side -----------------------------------------------------------------------

    def launch(self, batch: Any) -> StepPlan:
        """Plan the step that is about to run."""
        if self._planner is None:
            raise RuntimeError("kv press: a batch was launched before the radix cache was built")
        self.plan = self._planner.plan(batch)
        return self.plan

    def apply(self, decisions: StepDecisions) -> None:
        """Take a step's decisions into rows, tree, ledger and the kept-fraction estimate."""
        plan, packed = decisions.plan, decisions.packed()
        self.allocator.ledger.report(plan.step, decisions.free_cells)
        offset = 0
        for row in plan.rows:
            n = row.end - row.start
            bits = packed[offset : offset + n]
            row.state.fill(row.start, bits)
            if row.state.pending_node is not None and row.start < row.state.pending_end:
                self.tree.fill_pending(row.state, row.start, bits)
            counts = count_bits(bits).max(axis=1)
            self.allocator.kept_fractions.of(row.threshold).observe(
                int(counts.sum()), n * self.cells.layout.cells_per_token, n
            )
            offset += n

    # -- forward stream ---------------------------------------------------------------------

    def begin(self, out_cache_loc: torch.Tensor) -> None:
        """Head of a step: drain freed slots, pop cells for the new ones."""
        plan = self.require_plan()
        self._slots = out_cache_loc[: plan.tokens].to(torch.int64)
        self.allocator.drain()
        self.cells.pop(self._slots)
        layout, device = self.cells.layout, self._slots.device
        self.kept = torch.ones(plan.tokens, layout.layers, layout.heads, dtype=torch.bool, device=device)
        self._limits = score_limits(plan, device)
        self._reused = ReusedTokens.of(plan, device)

    def score(self, layer: int, inputs: LayerInput) -> None:
        """Decide one layer's new tokens from the layer's input, before its attention."""
        if isinstance(self._limits, float) and self._limits == -math.inf:
            return
        if self.plan is None or self.kept is None or self._slots is None:
            raise RuntimeError("kv press: a layer ran outside a planned step")
        n = self.plan.tokens
        if len(inputs.hidden) > n:  # padded for a graph
            inputs = LayerInput(*(tensor[:n] for tensor in inputs))
        condemned = self.press.score(layer, inputs).float() < self._limits
        if self.sinks:
            condemned &= (inputs.positions >= self.sinks)[:, None]
        self._reused.decide(self.cells.table[layer], condemned)
        self.kept[:, layer] = ~condemned
        self.cells.condemn(layer, self._slots, condemned)

    def take_reused(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's new keys and values (`[tokens, heads, dim]`), the tree's own where it still has them."""
        return self._reused.take(self.cells, layer, k, v)

    def end(self) -> StepDecisions:
        """Tail of a step: settle what left the window, pack the decisions."""
        plan, kept = self.require_plan(), self.kept
        if kept is None:
            raise RuntimeError("kv press: a step ended that did not begin")
        self._settle(plan)
        self._decisions = StepDecisions(plan, *self._gather(pack_bits(kept.flatten(1)), self.cells.free_cells))
        self.plan = self.kept = self._slots = None
        return self._decisions

    def _settle(self, plan: StepPlan) -> None:
        """Free what left the window. A prompt's kept cells are moved together, a decode step's stay."""
        single: list[torch.Tensor] = []
        for row, start, end in plan.settle:
            slots = self._req_to_token[row, start:end].to(torch.int64)
            if end - start >= COMPACT_FROM_TOKENS:
                self.allocator.pruned_cells += self.cells.settle_compact(slots)
            else:
                single.append(slots)
        if single:
            self.allocator.pruned_cells += self.cells.settle(torch.cat(single))

    def take_decisions(self) -> StepDecisions:
        """The decisions of the step that was just run, once. Raises when its forward did not run."""
        decisions, self._decisions = self._decisions, None
        if decisions is None:
            raise RuntimeError("kv press: a launched batch ran no forward")
        return decisions

    def require_plan(self) -> StepPlan:
        """The step being run. Raises when a forward was not planned by the scheduler."""
        if self.plan is None:
            raise RuntimeError("kv press: a forward ran that the scheduler did not plan")
        return self.plan
