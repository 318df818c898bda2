"""A step's work on the cells of a GPU: scores in fixed buffers, decided in the launch that stores keys and values.

What runs between `begin` and `end` may be a replay of recorded graphs, in which no Python runs: `score` and `write` read
and write buffers that stay where they are, and depend on nothing but the number of rows they are given.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from kvzap_sglang.kernels.counters import report_bytes
from kvzap_sglang.kernels.triton import step_report, write_cells
from kvzap_sglang.memory.device_cell_pool import DeviceCellPool
from kvzap_sglang.presses.base import LayerInput, Press
from kvzap_sglang.presses.kvzap import KVzapPress
from kvzap_sglang.score_limits import score_limits
from kvzap_sglang.sharing.reused_tokens import NO_REUSE, ReusedTokens
from kvzap_sglang.step_plan import StepPlan
from kvzap_sglang.to_device import to_device


class StepBuffers:
    """scores: `[layers, n, heads]`. limits: fp32 `[n]`. kept: int8 `[n, layers, heads]`."""

    def __init__(self, cells: DeviceCellPool, tokens: int, dtype: torch.dtype) -> None:
        layout, device = cells.layout, cells.table.device
        self.scores = torch.zeros(layout.layers, tokens, layout.heads, dtype=dtype, device=device)
        self.limits = torch.full((tokens,), -math.inf, device=device)
        self.kept = torch.ones(tokens, layout.layers, layout.heads, dtype=torch.int8, device=device)

    def __len__(self) -> int:
        return len(self.limits)


class DeviceStep:
    """One step after another over a `DeviceCellPool`.

    Attributes:
        kept: int8 `[tokens, layers, heads]` of the step being run, filled layer by layer; None between steps.
    """

    def __init__(self, press: Press, cells: DeviceCellPool, sinks: int, tokens: int, dtype: torch.dtype) -> None:
        """tokens: of a step that may be recorded; a longer one gets buffers of its own. dtype: of scores."""
        self.press, self._cells, self._sinks, self._dtype = press, cells, sinks, dtype
        self.kept: torch.Tensor | None = None
        self._fixed = self._buffers = StepBuffers(cells, tokens, dtype)
        self._uniform: float | None = None
        self._scoring = True
        self._tokens = 0
        self._reused = NO_REUSE

    def begin(self, plan: StepPlan, slots: torch.Tensor) -> None:
        """slots: int64 `[tokens]`, which have cells by now."""
        self._tokens = plan.tokens
        fits = plan.tokens <= len(self._fixed)
        self._buffers = self._fixed if fits else StepBuffers(self._cells, plan.tokens, self._dtype)
        self.kept = self._buffers.kept[: plan.tokens]
        limits = score_limits(plan, self._sinks)
        self._scoring = limits != -math.inf if isinstance(limits, float) else True
        self._set_limits(limits)
        self._reused = ReusedTokens.of(plan, slots.device)

    def _set_limits(self, limits: float | np.ndarray) -> None:
        if isinstance(limits, np.ndarray):
            self._buffers.limits[: len(limits)] = to_device(limits, self._buffers.limits.device)
            self._uniform = None
        elif self._buffers is not self._fixed:
            self._buffers.limits.fill_(limits)
        elif limits != self._uniform:
            self._fixed.limits.fill_(limits)
            self._uniform = limits

    def score(self, layer: int, inputs: LayerInput) -> None:
        """Score one layer's rows, those included that only pad the batch."""
        if self.kept is None and len(inputs.hidden) > len(self._buffers):
            raise RuntimeError(
                f"kv press: a forward of {len(inputs.hidden)} tokens is recorded, its buffers hold "
                f"{len(self._buffers)}: lower --cuda-graph-max-bs-prefill to --chunked-prefill-size"
            )
        if self._scoring:
            n = min(len(inputs.hidden), len(self._buffers))
            rows, out = LayerInput(*(tensor[:n] for tensor in inputs)), self._buffers.scores[layer, :n]
            if isinstance(self.press, KVzapPress):
                self.press.score_into(layer, rows, out)
            else:
                out.copy_(self.press.score(layer, rows))

    def write(
        self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decide a layer's new tokens, and store their keys and values, `[n, heads, dim]`, in the cells of `slots`.

        Returns what was stored: the tree's own where it still has them.
        """
        cells, buffers, n = self._cells, self._buffers, len(k)
        table, scores = cells.table[layer], buffers.scores[layer, :n]
        self._reused.decide_scores(table, scores)
        k, v = self._reused.take(cells, layer, k, v)
        write_cells(
            table,
            slots[:n],
            k,
            v,
            cells.k,
            cells.v,
            scores,
            buffers.limits[:n],
            buffers.kept[:n, layer],
            cells.counters,
        )
        return k, v

    def end(self) -> torch.Tensor:
        """The step's report (`kernels.counters`), in a buffer of its own."""
        if self.kept is None:
            raise RuntimeError("kv press: a step ended that did not begin")
        kept, self.kept = self.kept.flatten(1), None
        report = torch.empty(report_bytes(*kept.shape), dtype=torch.uint8, device=kept.device)
        step_report(kept, self._cells.counters, report)
        self._reused = NO_REUSE
        return report
