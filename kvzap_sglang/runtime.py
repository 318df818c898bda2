"""What happens around one forward: drain, pop, the layers' work (`Step`), settle, report.

All of it runs on the forward stream, in this order, so that a cell freed by one step can be
popped by the next without waiting for the CPU.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kvzap_sglang.config import KVPressConfig
from kvzap_sglang.memory.allocator import KVPressAllocator
from kvzap_sglang.memory.head_token_sets import count_bits
from kvzap_sglang.presses.base import LayerInput, Press
from kvzap_sglang.radix_cache import KVPressRadixCache
from kvzap_sglang.ranks import GatherReports, own_report
from kvzap_sglang.step_decisions import StepDecisions
from kvzap_sglang.step_plan import StepPlan, StepPlanner


class Step(Protocol):
    """The part of a step that depends on where the cells are: `HostStep`, `DeviceStep`."""

    press: Press
    kept: torch.Tensor | None

    def begin(self, plan: StepPlan, slots: torch.Tensor) -> None: ...

    def score(self, layer: int, inputs: LayerInput) -> None: ...

    def write(
        self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def end(self) -> torch.Tensor: ...


class KVPressRuntime:
    """One scheduler process' press: owns the order of events around each forward.

    Attributes:
        plan: the step being run, None between steps.
        step: what the model's layers call during one.
        window: positions that are never pruned.
    """

    def __init__(
        self,
        step: Step,
        allocator: KVPressAllocator,
        req_to_token: torch.Tensor,
        config: KVPressConfig,
        *,
        result_lag: int,
        gather: GatherReports = own_report,
    ) -> None:
        """`result_lag`: steps that may be launched before a step's result is processed."""
        self.step = step
        self.allocator = allocator
        self.cells = allocator.cells
        self.window = config.kv_press_window
        self.result_lag = result_lag
        self._gather = gather
        self.plan: StepPlan | None = None
        self._decisions: StepDecisions | None = None
        self._req_to_token = req_to_token
        self._tree: KVPressRadixCache | None = None
        self._planner: StepPlanner | None = None

    @property
    def serving(self) -> bool:
        """The scheduler is built; before that forwards only warm up or are recorded."""
        return self._planner is not None

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
        if faults := decisions.faults():
            raise RuntimeError(f"kv press: the cell table is corrupt, {'; '.join(faults)}: restart the server")
        plan, packed = decisions.plan, decisions.packed()
        self.allocator.ledger.report(plan.step, decisions.free_cells())
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
        slots = out_cache_loc[: plan.tokens].to(torch.int64)
        self.allocator.drain()
        self.cells.pop(slots)
        self.step.begin(plan, slots)

    def end(self) -> StepDecisions:
        """Tail of a step: settle what left the window, report."""
        plan = self.require_plan()
        self.cells.settle_rows(self._req_to_token, plan.settle)
        self._decisions = StepDecisions(plan, self._gather(self.step.end()))
        self.plan = None
        return self._decisions

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
