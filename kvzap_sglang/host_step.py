"""A step's work on the cells of a CPU: decide a layer's new tokens, store their keys and values, report."""

from __future__ import annotations

import math

import numpy as np
import torch

from kvzap_sglang.kernels import counters
from kvzap_sglang.kernels.bits import pack_bits
from kvzap_sglang.kernels.cpu import write_cells
from kvzap_sglang.memory.cell_pool import CellPool
from kvzap_sglang.presses.base import LayerInput, Press
from kvzap_sglang.score_limits import score_limits
from kvzap_sglang.sharing.reused_tokens import NO_REUSE, ReusedTokens
from kvzap_sglang.step_plan import StepPlan


class HostStep:
    """One step after another over a `CellPool`; decisions are in the cell table before a layer's attention.

    Attributes:
        kept: bool `[tokens, layers, heads]` of the step being run, filled layer by layer; None between steps.
    """

    def __init__(self, press: Press, cells: CellPool, sinks: int) -> None:
        self.press, self._cells, self._sinks = press, cells, sinks
        self.kept: torch.Tensor | None = None
        self._slots = torch.empty(0, dtype=torch.int64)
        self._limits: torch.Tensor | float = -math.inf
        self._reused = NO_REUSE

    def begin(self, plan: StepPlan, slots: torch.Tensor) -> None:
        """slots: int64 `[tokens]`, which have cells by now."""
        layout = self._cells.layout
        self._slots = slots
        self.kept = torch.ones(plan.tokens, layout.layers, layout.heads, dtype=torch.bool)
        limits = score_limits(plan, self._sinks)
        self._limits = torch.from_numpy(limits)[:, None] if isinstance(limits, np.ndarray) else limits
        self._reused = ReusedTokens.of(plan, slots.device)

    def score(self, layer: int, inputs: LayerInput) -> None:
        """Decide one layer's new tokens. inputs: of the step's tokens, and of rows that only pad the batch."""
        if isinstance(self._limits, float) and self._limits == -math.inf:
            return
        if self.kept is None:
            raise RuntimeError("kv press: a layer ran outside a planned step")
        n = len(self.kept)
        if len(inputs.hidden) > n:
            inputs = LayerInput(*(tensor[:n] for tensor in inputs))
        condemned = self.press.score(layer, inputs).float() < self._limits
        self._reused.decide(self._cells.table[layer], condemned)
        self.kept[:, layer] = ~condemned
        self._cells.condemn(layer, self._slots, condemned)

    def write(
        self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values, `[n, heads, dim]`, in the cells of int `[n]` slots.

        Returns what was stored: the tree's own where it still has them.
        """
        k, v = self._reused.take(self._cells, layer, k, v)
        dtype = self._cells.k.dtype
        table, rows = self._cells.table[layer], slots.to(torch.int64)
        write_cells(table, rows, k.to(dtype), v.to(dtype), self._cells.k, self._cells.v)
        return k, v

    def end(self) -> torch.Tensor:
        """The step's report (`kernels.counters`)."""
        if self.kept is None:
            raise RuntimeError("kv press: a step ended that did not begin")
        numbers = torch.zeros(counters.COUNTERS, dtype=torch.int64)
        numbers[counters.FREE], numbers[counters.PRUNED] = self._cells.free_cells, self._cells.pruned_cells
        kept, self.kept = self.kept, None
        return torch.cat([numbers.view(torch.uint8), pack_bits(kept.flatten(1)).flatten()])
