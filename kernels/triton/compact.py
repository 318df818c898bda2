"""Lists of visible cells from one per chunk to one per (request, KV head): the page table that FlashInfer takes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..encoding import CELL_MASK
from .visible import PROGRAMS, VisibleChunks, batch_size, request_of, warps

_CELL_MASK = tl.constexpr(CELL_MASK)
BLOCK = 64
"""Chunks that are counted in one go."""


@triton.jit
def _sizes_kernel(
    first, counts, before, sizes, HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    request = tl.program_id(0)
    head = tl.arange(0, HEADS_PADDED)
    end = tl.load(first + request + 1)
    total = tl.zeros([HEADS_PADDED], tl.int32)
    for at in range(tl.load(first + request), end, BLOCK):
        chunk = at + tl.arange(0, BLOCK)
        inside = (chunk < end)[:, None] & (head < HEADS)[None, :]
        where = chunk.to(tl.int64)[:, None] * HEADS + head[None, :]
        count = tl.load(counts + where, mask=inside, other=0)
        tl.store(before + where, total[None, :] + tl.cumsum(count, axis=0) - count, mask=inside)
        total += tl.sum(count, axis=0)
    tl.store(sizes + request * HEADS + head, total, mask=head < HEADS)


@triton.jit
def _compact_kernel(
    first, cells, counts, before, sizes, indptr, indices, batch,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, CHUNK: tl.constexpr, BATCH: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    segment = tl.arange(0, SEGMENTS)
    there = segment < batch * HEADS
    size = tl.load(sizes + segment, mask=there, other=0)
    if tl.program_id(0) == 0:
        tl.store(indptr, 0)
        tl.store(indptr + 1 + segment, tl.cumsum(size, axis=0), mask=there)
    head, n = tl.arange(0, HEADS_PADDED), tl.arange(0, CHUNK)
    for at in range(tl.program_id(0), tl.load(first + batch), tl.num_programs(0)):
        request = request_of(first, at, batch, BATCH)
        own = tl.load(sizes + request * HEADS + head, mask=head < HEADS, other=0)
        # Every program adds up what lies before its request: a scan of its own would be one more launch.
        begin = tl.sum(tl.where(segment < request * HEADS, size, 0), axis=0) + tl.cumsum(own, axis=0) - own
        listed = tl.full([], at, tl.int64) * HEADS + head
        count = tl.load(counts + listed, mask=head < HEADS, other=0)
        target = begin + tl.load(before + listed, mask=head < HEADS, other=0)
        taken = n[None, :] < count[:, None]
        entry = tl.load(cells + listed[:, None] * CHUNK + n[None, :], mask=taken, other=0)
        tl.store(indices + target[:, None] + n[None, :], entry & _CELL_MASK, mask=taken)


def compact_lists(visible: VisibleChunks, indptr: torch.Tensor, indices: torch.Tensor) -> None:
    """Put the lists of each (request, KV head) behind one another, in position order, without `CONDEMNED` bits.

    Segment `s = b * H + h` becomes `indices[indptr[s]:indptr[s + 1]]`. Beyond `indptr[B * H]` nothing is written.

    visible: B requests, H heads. indptr: int32 `[B * H + 1]`. indices: int32 `[capacity]`, room for every visible cell
    (the sum of the requests' lengths, times H, always suffices); below `2**31`.
    """
    chunks, heads, chunk = visible.cells.shape
    batch = len(visible.first) - 1
    if not chunks or not batch:
        indptr.zero_()
        return
    scratch = torch.empty(chunks + batch, heads, dtype=torch.int32, device=indptr.device)
    before, sizes = scratch[:chunks], scratch[chunks:]
    padded = triton.next_power_of_2(heads)
    _sizes_kernel[(batch,)](
        visible.first, visible.counts, before, sizes, HEADS=heads, HEADS_PADDED=padded, BLOCK=BLOCK, num_warps=4
    )
    _compact_kernel[(min(chunks, PROGRAMS),)](
        visible.first, visible.cells, visible.counts, before, sizes, indptr, indices, batch,
        HEADS=heads, HEADS_PADDED=padded, CHUNK=chunk, BATCH=batch_size(batch),
        SEGMENTS=triton.next_power_of_2(batch_size(batch) * heads), num_warps=warps(chunk, heads),
    )  # fmt: skip
