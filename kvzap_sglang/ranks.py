"""Tensor parallelism: every rank learns what all ranks kept, so that all schedule alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvzap_sglang.memory.head_token_sets import SetShape

GatherDecisions = Callable[[torch.Tensor, int], tuple[torch.Tensor, int]]
"""Packed bits uint8 `[tokens, bytes]` and free cells of this rank -> `[tokens, ranks, bytes]` and the fewest."""

_COUNT_BYTES = 8


def own_decisions(packed: torch.Tensor, free_cells: int) -> tuple[torch.Tensor, int]:
    """`GatherDecisions` of a single rank."""
    return packed[:, None, :], free_cells


def gather_decisions() -> GatherDecisions:
    """What fits this process' tensor-parallel group."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return own_decisions if parallel.attn_tp_size == 1 else gather_over(parallel.attn_tp_group.device_group)


def gather_over(group: Any) -> GatherDecisions:
    """`GatherDecisions` over a torch process group: one collective per step."""
    ranks = torch.distributed.get_world_size(group)

    def gather(packed: torch.Tensor, free_cells: int) -> tuple[torch.Tensor, int]:
        count = torch.tensor([free_cells], dtype=torch.int64).view(torch.uint8)
        mine = torch.cat([packed.flatten(), count.to(packed.device)])
        everyone = mine.new_empty(ranks * len(mine))
        torch.distributed.all_gather_into_tensor(everyone, mine, group=group)
        parts = everyone.view(ranks, -1)
        free = parts[:, -_COUNT_BYTES:].contiguous().view(torch.int64).min()
        return parts[:, :-_COUNT_BYTES].view(ranks, *packed.shape).transpose(0, 1), int(free)

    return gather


def set_shape(cells_per_token: int) -> SetShape:
    """Shape of the kept bits in this process' tensor-parallel group."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return SetShape(cells_per_token, parallel.attn_tp_size, parallel.attn_tp_rank)
