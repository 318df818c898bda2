"""Linear layers in bf16 for CPUs that have no bf16 arithmetic."""

from __future__ import annotations

import torch

from .. import reference
from . import build
from .native import declare, isa_level, need

FEW_ROWS = 64
"""Up to here reading the weights is the cost; beyond, torch's fp32 product of the widened weights is faster."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `reference.linear`. Raises ValueError for arguments that are not contiguous bf16, or do not fit."""
    need(x, "x", torch.bfloat16, 2)
    need(weight, "weight", torch.bfloat16, 2)
    (rows, width), outputs = x.shape, weight.shape[0]
    if weight.shape[1] != width:
        raise ValueError(f"x has {width} columns, weight {weight.shape[1]}")
    if bias is not None:
        need(bias, "bias", torch.bfloat16, 1)
        if len(bias) != outputs:
            raise ValueError(f"bias has {len(bias)} entries for {outputs} outputs")
    library = build.library() if rows <= FEW_ROWS else None
    if library is None:
        return reference.linear(x, weight, bias)
    out = torch.empty(rows, outputs, dtype=torch.bfloat16)
    declare(library).kvzap_linear(
        isa_level(), x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        rows, outputs, width, torch.get_num_threads(),
    )  # fmt: skip
    return out
