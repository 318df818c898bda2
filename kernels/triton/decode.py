"""Decode attention over lists of visible cells: one program per (request, KV head, chunk), then a merge."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .softmax import LOG2E, attend_block
from .visible import PROGRAMS, VisibleChunks, batch_size, request_of

_LN2 = tl.constexpr(0.6931471805599453)
KEYS = 64  # per iteration


@triton.jit
def _chunk_kernel(
    q, k_pool, v_pool, first, cells, counts, part, part_lse, scale_log2e, batch, stride_q, stride_k, stride_v,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, BATCH: tl.constexpr,
    GROUP_PADDED: tl.constexpr, DIM_PADDED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    g = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, DIM_PADDED)
    in_group, in_dim = g < GROUP, d < DIM
    for at in range(tl.program_id(0), tl.load(first + batch), tl.num_programs(0)):
        chunk = tl.full([], at, tl.int64)
        count = tl.load(counts + chunk * HEADS + head)
        if count > 0:
            request = request_of(first, at, batch, BATCH)
            q_at = request.to(tl.int64) * stride_q + (head * GROUP + g[:, None]) * DIM + d[None, :]
            query = tl.load(q + q_at, mask=in_group[:, None] & in_dim[None, :], other=0.0)
            listed = cells + (chunk * HEADS + head) * CHUNK
            peak = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
            mass = tl.zeros([GROUP_PADDED], tl.float32)
            total = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
            for start in range(0, count, KEYS):
                n = start + tl.arange(0, KEYS)
                there = n < count
                cell = tl.load(listed + n, mask=there, other=0).to(tl.int64)
                key = tl.load(
                    k_pool + cell[None, :] * stride_k + d[:, None], mask=there[None, :] & in_dim[:, None], other=0.0
                )
                value = tl.load(
                    v_pool + cell[:, None] * stride_v + d[None, :], mask=there[:, None] & in_dim[None, :], other=0.0
                )
                peak, mass, total = attend_block(query, key, value, there[None, :], peak, mass, total, scale_log2e)
            row = chunk * HEADS * GROUP + head * GROUP + g
            tl.store(
                part + row[:, None] * DIM + d[None, :], total / mass[:, None], mask=in_group[:, None] & in_dim[None, :]
            )
            tl.store(part_lse + row, peak + tl.log2(mass), mask=in_group)


@triton.jit
def _merge_kernel(
    first, counts, part, part_lse, out, lse,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    GROUP_PADDED: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0), tl.program_id(1)
    g = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, DIM_PADDED)
    in_group = g < GROUP
    inside = in_group[:, None] & (d < DIM)[None, :]
    peak = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    mass = tl.zeros([GROUP_PADDED], tl.float32)
    total = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    begin = tl.load(first + request).to(tl.int64)
    for c in range(0, tl.load(first + request + 1) - tl.load(first + request)):
        chunk = begin + c
        if tl.load(counts + chunk * HEADS + head) > 0:
            row = chunk * HEADS * GROUP + head * GROUP + g
            its_lse = tl.load(part_lse + row, mask=in_group, other=0.0)
            its_out = tl.load(part + row[:, None] * DIM + d[None, :], mask=inside, other=0.0)
            highest = tl.maximum(peak, its_lse)
            shrink, weight = tl.exp2(peak - highest), tl.exp2(its_lse - highest)
            total = total * shrink[:, None] + its_out * weight[:, None]
            mass = mass * shrink + weight
            peak = highest
    # Nothing visible: mass is 0, the output 0, and the logarithm -inf.
    result = total / tl.where(mass > 0, mass, 1.0)[:, None]
    row = (request.to(tl.int64) * HEADS + head) * GROUP + g
    tl.store(out + row[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row, (peak + tl.log2(mass)) * _LN2, mask=in_group)


def chunked_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    visible: VisibleChunks,
    scale: float,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attention of one query per request over its visible cells, with fp32 accumulation, into `out` and `lse`.

    q: `[B, Hq, D]` with dense rows; query heads `h * G .. h * G + G - 1` use KV head h. k_pool, v_pool: `[N, D]` of
    q's dtype. visible: of one layer. scale: of the scores.
    part, part_lse: fp32 scratch `[chunks, Hq, D]` and `[chunks, Hq]`. out: `[B, Hq, D]`, contiguous; lse: fp32
    `[B, Hq]`, natural log of the sum of exponentials. A head that sees nothing gives out 0 and lse -inf.
    """
    batch, q_heads, dim = q.shape
    chunks, heads, chunk = visible.cells.shape
    group = q_heads // heads
    sizes = {
        "HEADS": heads,
        "GROUP": group,
        "DIM": dim,
        "GROUP_PADDED": max(16, triton.next_power_of_2(group)),
        "DIM_PADDED": triton.next_power_of_2(dim),
    }
    if chunks:
        _chunk_kernel[(min(chunks, max(1, PROGRAMS // heads)), heads)](
            q, k_pool, v_pool, visible.first, visible.cells, visible.counts, part, part_lse, scale * LOG2E, batch,
            q.stride(0), k_pool.stride(0), v_pool.stride(0), CHUNK=chunk, BATCH=batch_size(batch), KEYS=KEYS, **sizes,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    _merge_kernel[(batch, heads)](visible.first, visible.counts, part, part_lse, out, lse, **sizes, num_warps=4)
