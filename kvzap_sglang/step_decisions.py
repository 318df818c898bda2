"""What a step decided, on its way to the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvzap_sglang.kernels import counters
from kvzap_sglang.memory.head_token_sets import BitArray
from kvzap_sglang.step_plan import StepPlan


class StepDecisions:
    """A step's reports of all ranks (SGLang's `DeviceAuxiliaryOutput` protocol). `plan`: the step."""

    def __init__(self, plan: StepPlan, reports: torch.Tensor) -> None:
        """reports: uint8 `[ranks, n]`, each as `kernels.counters` says; nobody else writes to them."""
        self.plan = plan
        self._device_reports = reports
        self._host_reports: torch.Tensor | None = None

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> StepDecisions:
        """Start the copy (`DeviceAuxiliaryOutput`); called once, on the copy stream."""
        if self._host_reports is None:
            self._host_reports = copy_tensor(self._device_reports)
        return self

    def consume(self, batch: Any, commits: Any) -> None:
        """Nothing left to do (`HostAuxiliaryOutput`): decisions are applied before the batch is processed."""

    def packed(self) -> BitArray:
        """uint8 `[tokens, ranks, bytes]`: the kept bits of the step's tokens, in row order."""
        bits = self._reports()[:, counters.HEADER_BYTES :]
        return bits.reshape(len(bits), self.plan.tokens, -1).transpose(1, 0, 2) if self.plan.tokens else bits[:0, None]

    def free_cells(self) -> int:
        """Free cells after the step, on the rank that has fewest."""
        return int(self._counters()[:, counters.FREE].min())

    def faults(self) -> list[str]:
        """What went wrong on any rank's device: corruption, for which there is no remedy."""
        return counters.faults(int(np.bitwise_or.reduce(self._counters()[:, counters.FAULT])))

    def _counters(self) -> Any:
        return np.ascontiguousarray(self._reports()[:, : counters.HEADER_BYTES]).view(np.int64)

    def _reports(self) -> BitArray:
        """On the host; waits for a copy that nobody started (prefill-only batches)."""
        source = self._device_reports if self._host_reports is None else self._host_reports
        return source.cpu().numpy()
