"""Attention of a prompt's chunk: its visible prefix per head, then itself, in one online softmax.

A program computes one tile of queries of one (request, KV head). Its rows are (token, query head of the group) pairs, so
that a group shares every key and value that is read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..encoding import CELL_MASK, CONDEMNED
from .softmax import LOG2E, attend_block
from .visible import VisibleChunks

_CONDEMNED = tl.constexpr(CONDEMNED)
_CELL_MASK = tl.constexpr(CELL_MASK)


@triton.jit
def _extend_kernel(
    q, k, v, k_pool, v_pool, first, cells, counts, positions, starts, begins, tokens_of, kept, out, scale_log2e, window,
    stride_q, stride_kt, stride_vt, stride_k, stride_v, stride_kept, stride_out,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, SPARSE: tl.constexpr,
    DIM_PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(begins + request).to(tl.int64)
    tokens = tl.load(tokens_of + request).to(tl.int32)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(2) * ROWS < tokens * GROUP:
        token, d = row // GROUP, tl.arange(0, DIM_PADDED)
        q_head = head * GROUP + row % GROUP
        in_dim, in_chunk = d < DIM, token < tokens
        inside = in_chunk[:, None] & in_dim[None, :]
        at = (begin + token)[:, None] * stride_q + q_head[:, None] * DIM + d[None, :]
        query = tl.load(q + at, mask=inside, other=0.0)
        position = tl.load(starts + request).to(tl.int32) + token
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, DIM_PADDED], tl.float32)
        first_chunk = tl.load(first + request).to(tl.int64)
        for c in range(0, tl.load(first + request + 1) - tl.load(first + request)):
            listed = (first_chunk + c) * HEADS + head
            count = tl.load(counts + listed)
            for n0 in range(0, count, KEYS):
                n = n0 + tl.arange(0, KEYS)
                there = n < count
                entry = tl.load(cells + listed * CHUNK + n, mask=there, other=0)
                cell = (entry & _CELL_MASK).to(tl.int64)
                seen = there[None, :] & in_chunk[:, None]
                if SPARSE:
                    key_at = tl.load(positions + listed * CHUNK + n, mask=there, other=0)
                    near = position[:, None] - key_at[None, :] <= window
                    seen = seen & ((entry < _CONDEMNED)[None, :] | near)
                key = tl.load(
                    k_pool + cell[None, :] * stride_k + d[:, None], mask=there[None, :] & in_dim[:, None], other=0.0
                )
                value = tl.load(
                    v_pool + cell[:, None] * stride_v + d[None, :], mask=there[:, None] & in_dim[None, :], other=0.0
                )
                peak, mass, total = attend_block(query, key, value, seen, peak, mass, total, scale_log2e)
        last = tl.minimum((tl.program_id(2) * ROWS + ROWS - 1) // GROUP + 1, tokens)
        for n0 in range(0, last, KEYS):
            n = n0 + tl.arange(0, KEYS)
            there = n < last
            own = begin + n
            seen = there[None, :] & in_chunk[:, None] & (n[None, :] <= token[:, None])
            if SPARSE:
                is_kept = tl.load(kept + own * stride_kept + head, mask=there, other=0) != 0
                seen = seen & (is_kept[None, :] | (token[:, None] - n[None, :] <= window))
            key_at = own[None, :] * stride_kt + head * DIM + d[:, None]
            key = tl.load(k + key_at, mask=there[None, :] & in_dim[:, None], other=0.0)
            value_at = own[:, None] * stride_vt + head * DIM + d[None, :]
            value = tl.load(v + value_at, mask=there[:, None] & in_dim[None, :], other=0.0)
            peak, mass, total = attend_block(query, key, value, seen, peak, mass, total, scale_log2e)
        result = total / tl.where(mass > 0, mass, 1.0)[:, None]
        at = (begin + token)[:, None] * stride_out + q_head[:, None] * DIM + d[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


class Tile(NamedTuple):
    """Rows of queries, keys per iteration, warps of a program."""

    rows: int
    keys: int
    warps: int


def tile(dim: int, capability: int, sparse: bool) -> Tile:
    """The largest that do not spill (`cross_compile`). capability: 80, 90, ... (of the GPU)."""
    if dim > 128:
        return Tile(64, 32, 8)
    if dim > 64 and (capability < 90 or (capability >= 100 and sparse)):
        return Tile(64, 64, 8)
    return Tile(128, 64, 8)


def extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    prefix: VisibleChunks,
    starts: torch.Tensor,
    begins: torch.Tensor,
    tokens: torch.Tensor,
    scale: float,
    window: int,
    kept: torch.Tensor | None,
    out: torch.Tensor,
    longest_chunk: int,
) -> None:
    """Attention of B chunks of consecutive new tokens, each after its prefix, with fp32 accumulation, into `out`.

    q, out: `[T, Hq, D]`; k, v: `[T, H, D]`, the new tokens; all with dense heads and rows, any token stride.
    k_pool, v_pool: `[N, D]` of q's dtype. prefix: visible cells of the positions before each chunk.
    starts: int `[B]`, position of each chunk's first token. begins, tokens: int `[B]`; chunk b is the tokens
    `begins[b]:begins[b] + tokens[b]`, other rows of `out` are left alone. longest_chunk: no chunk has more (host).

    kept None (dense): a token sees all of `prefix` and every earlier token of its chunk. kept bool or int8 `[T, H]`
    (sparse): of both only what is kept, or at most `window` positions back; `prefix` then has `positions`, and holds
    every condemned cell that the chunk's first token can see.
    """
    heads, chunk = prefix.cells.shape[1:]
    group, dim = q.shape[1] // heads, q.shape[2]
    if kept is not None and prefix.positions is None:
        raise ValueError("a sparse extend needs the positions of its prefix")
    major, minor = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
    rows, keys, warps = tile(dim, 10 * major + minor, kept is not None)
    grid = (len(begins), heads, max(1, triton.cdiv(longest_chunk * group, rows)))
    _extend_kernel[grid](
        q, k, v, k_pool, v_pool, prefix.first, prefix.cells, prefix.counts,
        prefix.cells if prefix.positions is None else prefix.positions, starts, begins, tokens,
        prefix.cells if kept is None else kept, out, scale * LOG2E, window, q.stride(0), k.stride(0), v.stride(0),
        k_pool.stride(0), v_pool.stride(0), 0 if kept is None else kept.stride(0), out.stride(0),
        HEADS=heads, GROUP=group, DIM=dim, CHUNK=chunk, SPARSE=kept is not None,
        DIM_PADDED=triton.next_power_of_2(dim), ROWS=rows, KEYS=keys, num_warps=warps, num_stages=2,
    )  # fmt: skip
