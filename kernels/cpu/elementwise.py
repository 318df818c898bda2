"""Norm and rotary embedding in bf16."""

from __future__ import annotations

import torch

from .. import reference
from . import build
from .native import declare, need


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.rms_norm`. Raises ValueError for arguments that are not contiguous bf16, or do not fit."""
    need(x, "x", torch.bfloat16, 2)
    need(weight, "weight", torch.bfloat16, 1)
    rows, width = x.shape
    if len(weight) != width:
        raise ValueError(f"x has {width} columns, weight {len(weight)}")
    if residual is not None:
        need(residual, "residual", torch.bfloat16, 2)
        if residual.shape != x.shape:
            raise ValueError(f"x is {tuple(x.shape)}, residual {tuple(residual.shape)}")
    library = build.library()
    if library is None:
        return reference.rms_norm(x, weight, epsilon, residual)
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    declare(library).kvzap_rms_norm(
        x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(), epsilon, out.data_ptr(),
        total.data_ptr(), rows, width, torch.get_num_threads(),
    )  # fmt: skip
    return out, total


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """See `reference.rotate`. Raises ValueError for arguments of another dtype or layout, or that do not fit."""
    need(positions, "positions", torch.int64, 1)
    need(cos_sin, "cos_sin", torch.bfloat16, 2)
    dim = cos_sin.shape[1]
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.stride(1) != 1 or x.shape[1] % dim or dim % 2:
        raise ValueError(f"x must be bf16 [n, heads * {dim}] with dense rows, got {x.dtype} {tuple(x.shape)}")
    if len(positions) != len(x):
        raise ValueError(f"{len(positions)} positions for {len(x)} rows")
    library = build.library()
    if library is None:
        return reference.rotate(x, positions, cos_sin)
    out = torch.empty(x.shape, dtype=x.dtype)
    bad: int = declare(library).kvzap_rotate(
        x.data_ptr(), x.stride(0), positions.data_ptr(), cos_sin.data_ptr(), len(cos_sin), out.data_ptr(), len(x),
        x.shape[1] // dim, dim, torch.get_num_threads(),
    )  # fmt: skip
    if bad:
        raise reference.no_angle(int(positions[bad - 1]), len(cos_sin))
    return out
