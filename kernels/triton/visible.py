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
def _visible_kernel(
    table, req_to_token, rows, lengths, dense_from, first, cells, counts, positions, stride_row,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, CHUNK: tl.constexpr, DETAIL: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    start = tl.program_id(1) * CHUNK
    length = tl.load(lengths + request).to(tl.int32)
    if start < length:
        row = tl.load(rows + request).to(tl.int64)
        position = start + tl.arange(0, CHUNK)
        head = tl.arange(0, HEADS_PADDED)
        there = position < length
        slot = tl.load(req_to_token + row * stride_row + position, mask=there, other=0).to(tl.int64)
        wanted = there[:, None] & (head < HEADS)[None, :]
        entry = tl.load(table + slot[:, None] * HEADS + head[None, :], mask=wanted, other=-1)
        in_window = position >= tl.load(dense_from + request)
        visible = (entry >= 0) & ((entry < _CONDEMNED) | in_window[:, None])
        taken = visible.to(tl.int32)
        place = tl.cumsum(taken, axis=0) - taken
        chunk = (tl.load(first + request) + tl.program_id(1)).to(tl.int64)
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
    longest: int,
) -> None:
    """Fill `out` for one layer and the first `lengths[b]` positions of each request.

    Position i is visible iff its entry names a cell, and that is not condemned or i >= dense_from[b].

    table: int32 `[S, H]`, one layer's cell table (entries as in `encoding`).
    req_to_token: int32 `[R, context]`; request b's token slots are `req_to_token[rows[b], :lengths[b]]`.
    rows, lengths, dense_from: int `[B]`. out: with `first` as `first_chunks` gives it. longest: no length is above
    it (host).
    """
    heads, chunk = out.cells.shape[1:]
    grid = (len(rows), max(1, triton.cdiv(longest, chunk)))
    detail = out.positions is not None
    _visible_kernel[grid](
        table, req_to_token, rows, lengths, dense_from, out.first, out.cells, out.counts,
        out.positions if detail else out.cells, req_to_token.stride(0),
        HEADS=heads, HEADS_PADDED=triton.next_power_of_2(heads), CHUNK=chunk, DETAIL=detail,
        num_warps=warps(chunk, heads),
    )  # fmt: skip


def warps(chunk: int, heads: int) -> int:
    """Warps of a program that holds `chunk * heads` entries in registers."""
    return 8 if chunk * heads >= 4096 else 4
