"""Storing new K and V rows in the cells of their token slots, and marking the condemned ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..counters import FAULT, HOMELESS
from ..encoding import CELL_MASK, CONDEMNED

_CONDEMNED = tl.constexpr(CONDEMNED)
_CELL_MASK = tl.constexpr(CELL_MASK)
_FAULT, _HOMELESS = tl.constexpr(FAULT), tl.constexpr(HOMELESS)
TOKENS = 16  # per program


@triton.jit
def _write_kernel(
    table, slots, k, v, k_pool, v_pool, scores, limits, kept, counters, tokens, stride_kt, stride_vt, stride_kn,
    stride_vn, stride_scores, stride_kept,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    d = tl.arange(0, DIM_PADDED)
    there = t < tokens
    token = t.to(tl.int64)
    slot = tl.load(slots + token, mask=there, other=0).to(tl.int64)
    at = table + slot * HEADS + head
    entry = tl.load(at, mask=there, other=-1)
    owned = there & (entry >= 0)
    # Padding rows of a graph write to slot 0: nobody reads its cell, if it has one.
    missing = there & (entry < 0) & (slot != 0)
    bit = tl.full([], _HOMELESS, tl.int64)
    tl.atomic_or(counters + _FAULT, bit, mask=tl.sum(missing.to(tl.int32), axis=0) > 0)
    condemned = tl.load(scores + token * stride_scores + head, mask=there, other=0.0).to(tl.float32) < tl.load(
        limits + token, mask=there, other=0.0
    )
    tl.store(at, entry | _CONDEMNED, mask=owned & condemned & (slot != 0))
    tl.store(kept + token * stride_kept + head, (condemned == 0).to(tl.int8), mask=there)
    cell = (entry & _CELL_MASK).to(tl.int64)
    inside = owned[:, None] & (d < DIM)[None, :]
    column = head * DIM + d[None, :]
    key = tl.load(k + token[:, None] * stride_kt + column, mask=inside, other=0.0)
    tl.store(k_pool + cell[:, None] * stride_kn + d[None, :], key.to(k_pool.dtype.element_ty), mask=inside)
    value = tl.load(v + token[:, None] * stride_vt + column, mask=inside, other=0.0)
    tl.store(v_pool + cell[:, None] * stride_vn + d[None, :], value.to(v_pool.dtype.element_ty), mask=inside)


def write_cells(
    table: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    scores: torch.Tensor,
    limits: torch.Tensor,
    kept: torch.Tensor,
    counters: torch.Tensor,
) -> None:
    """Store the K and V rows of one layer's new tokens, mark those condemned that score below their limit.

    table: int32 `[S, H]`, one layer's cell table; changed. slots: int `[T]`, distinct but for padding
    (0, never condemned).
    k, v: `[T, H, D]` with dense rows. k_pool, v_pool: `[N, D]`; values are converted to their dtype.
    scores: `[T, H]`, any floating dtype, dense heads. limits: fp32 `[T]`; -inf keeps all.
    kept: bool or int8 `[T, H]` view (of one layer, any token stride): 1 where not condemned.
    counters: int64 `[COUNTERS]`; `HOMELESS` is flagged when a token other than padding has no cell; nothing is stored
    for it.
    """
    tokens, heads, dim = k.shape
    _write_kernel[(triton.cdiv(tokens, TOKENS), heads)](
        table, slots, k, v, k_pool, v_pool, scores, limits, kept, counters, tokens, k.stride(0), v.stride(0),
        k_pool.stride(0), v_pool.stride(0), scores.stride(0), kept.stride(0), HEADS=heads, DIM=dim,
        DIM_PADDED=triton.next_power_of_2(dim), TOKENS=TOKENS, num_warps=4,
    )  # fmt: skip
