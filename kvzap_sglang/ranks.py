"""Tensor parallelism: every rank learns what all ranks kept, so that all schedule alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvzap_sglang.memory.head_token_sets import SetShape

GatherReports = Callable[[torch.Tensor], torch.Tensor]
"""This rank's report of a step (uint8 `[n]`, see `kernels.counters`) -> those of all ranks, uint8 `[ranks, n]`."""


def own_report(report: torch.Tensor) -> torch.Tensor:
    """`GatherReports` of a single rank."""
    return report[None]


def gather_reports() -> GatherReports:
    """What fits this process' tensor-parallel group."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return own_report if parallel.attn_tp_size == 1 else gather_over(parallel.attn_tp_group.device_group)


def gather_over(group: Any) -> GatherReports:
    """`GatherReports` over a torch process group: one collective per step, started on the current stream."""
    ranks = torch.distributed.get_world_size(group)

    def gather(report: torch.Tensor) -> torch.Tensor:
        everyone = report.new_empty(ranks * len(report))
        torch.distributed.all_gather_into_tensor(everyone, report, group=group)
        return everyone.view(ranks, -1)

    return gather


def set_shape(cells_per_token: int) -> SetShape:
    """Shape of the kept bits in this process' tensor-parallel group."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return SetShape(cells_per_token, parallel.attn_tp_size, parallel.attn_tp_rank)
