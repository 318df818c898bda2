"""Which cells one query of each request sees, per KV head of one layer, as lists of one chunk of positions each.

A list per chunk, not per request: its place is known before anything is counted, so one pass over the cell table
suffices, the order is that of the positions, and a chunk is one unit of work of decode attention. Heads that keep
little have short lists in the same number of chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..encoding import CELL_MASK, CONDEMNED

_CONDEMNED = tl.constexpr(CONDEMNED)
_CELL_MASK = tl.constexpr(CELL_MASK)
PROGRAMS = 1024
"""Most programs of a launch. Each goes on to further chunks, up to a number that only the device knows: a graph's
launch has as many programs whatever the batch holds."""


class VisibleChunks(NamedTuple):
    """Visible cells of B requests, for every KV head of one layer.

    Positions `[j * C, (j + 1) * C)` of request b are chunk `first[b] + j`; its list for head h is
    `cells[chunk, h, :counts[chunk, h]]`, in position order. Chunks from `first[B]` on hold nothing.

    first: int32 `[B + 1]`. cells: int32 `[chunks, H, C]`. counts: int32 `[chunks, H]`.
    positions: int32 like cells, or None. Where they are asked for, `cells` keep the `CONDEMNED` bit of their entries.
    """

    first: torch.Tensor
    cells: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor | None = None


def first_chunks(lengths: torch.Tensor, chunk: int, out: torch.Tensor) -> torch.Tensor:
    """First chunk of each request, and the number of all: int `[B]` lengths into int32 `[B + 1]` `out`."""
    out[0] = 0
    torch.cumsum((lengths + (chunk - 1)) // chunk, dim=0, dtype=torch.int32, out=out[1:])
    return out


@triton.jit
def _place_kernel(lengths, first, dense_from, batch, chunk, window, BATCH: tl.constexpr):
    request = tl.arange(0, BATCH)
    there = request < batch
    length = tl.load(lengths + request, mask=there, other=0).to(tl.int64)
    chunks = ((length + chunk - 1) // chunk).to(tl.int32)
    tl.store(first + 1 + request, tl.cumsum(chunks, axis=0), mask=there)
    tl.store(first + request, 0, mask=request == 0)
    tl.store(dense_from + request, length - 1 - window, mask=there)


def place_chunks(lengths: torch.Tensor, chunk: int, window: int, first: torch.Tensor, dense_from: torch.Tensor) -> None:
    """`first_chunks` and the windows of a decode step in one launch.

    lengths: int `[B]`, tokens of each request, the new one included. first: int32 `[B + 1]`. dense_from: int64 `[B]`, the
    first position of each window, which may be negative.
    """
    _place_kernel[(1,)](
        lengths, first, dense_from, len(lengths), chunk, window, BATCH=batch_size(len(lengths)), num_warps=4
    )


@triton.jit
def request_of(first, chunk, batch, BATCH: tl.constexpr):
    """The request that a chunk belongs to. BATCH: power of 2, at least `batch`."""
    later = tl.arange(0, BATCH) + 1
    begins = tl.load(first + later, mask=later <= batch, other=0x7FFFFFFF)
    return tl.sum((begins <= chunk).to(tl.int32), axis=0)


@triton.jit
def _visible_kernel(
    table, req_to_token, rows, lengths, dense_from, first, cells, counts, positions, batch, stride_row,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, CHUNK: tl.constexpr, BATCH: tl.constexpr, DETAIL: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HEADS_PADDED)
    for at in range(tl.program_id(0), tl.load(first + batch), tl.num_programs(0)):
        request = request_of(first, at, batch, BATCH)
        position = (at - tl.load(first + request)) * CHUNK + tl.arange(0, CHUNK)
        row = tl.load(rows + request).to(tl.int64)
        there = position < tl.load(lengths + request).to(tl.int32)
        slot = tl.load(req_to_token + row * stride_row + position, mask=there, other=0).to(tl.int64)
        wanted = there[:, None] & (head < HEADS)[None, :]
        entry = tl.load(table + slot[:, None] * HEADS + head[None, :], mask=wanted, other=-1)
        in_window = position >= tl.load(dense_from + request)
        visible = (entry >= 0) & ((entry < _CONDEMNED) | in_window[:, None])
        taken = visible.to(tl.int32)
        place = tl.cumsum(taken, axis=0) - taken
        chunk = tl.full([], at, tl.int64)
        target = (chunk * HEADS + head[None, :]) * CHUNK + place
        if DETAIL:
            tl.store(cells + target, entry, mask=visible)
            tl.store(positions + target, position[:, None] + tl.zeros_like(entry), mask=visible)
        else:
            tl.store(cells + target, entry & _CELL_MASK, mask=visible)
        tl.store(counts + chunk * HEADS + head, tl.sum(taken, axis=0), mask=head < HEADS)


def visible_chunks(
    table: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    dense_from: torch.Tensor,
    out: VisibleChunks,
) -> None:
    """Fill `out` for one layer and the first `lengths[b]` positions of each request.

    Position i is visible iff its entry names a cell, and that is not condemned or i >= dense_from[b].

    table: int32 `[S, H]`, one layer's cell table (entries as in `encoding`).
    req_to_token: int32 `[R, context]`; request b's token slots are `req_to_token[rows[b], :lengths[b]]`.
    rows, lengths, dense_from: int `[B]`. out: with `first` as `first_chunks` gives it.
    """
    chunks, heads, chunk = out.cells.shape
    if not chunks:
        return
    detail = out.positions is not None
    _visible_kernel[(min(chunks, PROGRAMS),)](
        table, req_to_token, rows, lengths, dense_from, out.first, out.cells, out.counts,
        out.positions if detail else out.cells, len(rows), req_to_token.stride(0),
        HEADS=heads, HEADS_PADDED=triton.next_power_of_2(heads), CHUNK=chunk, BATCH=batch_size(len(rows)),
        DETAIL=detail, num_warps=warps(chunk, heads),
    )  # fmt: skip


def batch_size(batch: int) -> int:
    """What `BATCH` is for a batch: few values, since each is a kernel of its own."""
    return max(16, triton.next_power_of_2(batch))


def warps(chunk: int, heads: int) -> int:
    """Warps of a program that holds `chunk * heads` entries in registers."""
    return 8 if chunk * heads >= 4096 else 4
