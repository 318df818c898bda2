"""Taking cells from the free stack for new tokens, and giving back those of released or settled ones.

The stack's height is a number on the device (`counters`): how many cells a step frees is known nowhere else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..counters import FAULT, FREE, OVERFLOW, PRUNED, TICKET, UNDERFLOW
from ..encoding import CELL_MASK, CONDEMNED, NONE

_NONE, _CONDEMNED, _CELL_MASK = tl.constexpr(NONE), tl.constexpr(CONDEMNED), tl.constexpr(CELL_MASK)
_FREE, _PRUNED, _FAULT, _TICKET = tl.constexpr(FREE), tl.constexpr(PRUNED), tl.constexpr(FAULT), tl.constexpr(TICKET)
_UNDERFLOW, _OVERFLOW = tl.constexpr(UNDERFLOW), tl.constexpr(OVERFLOW)
PAIRS = 256
"""(token, head) pairs of a program."""


@triton.jit
def _add_fault(counters, bit, where):
    tl.atomic_or(counters + _FAULT, bit.to(tl.int64), mask=where)


@triton.jit
def _take_kernel(
    table, slots, stack, counters, tokens, layers, room, stride_layer, HEADS: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    layer = tl.program_id(1).to(tl.int64)
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    token, head = pair // HEADS, pair % HEADS
    there = token < tokens
    free = tl.load(counters + _FREE)
    # Not `tokens.to(...)`: a launch with one token has a plain constant there.
    need = tl.full([], layers, tl.int64) * tokens * HEADS
    at = free - 1 - ((layer * HEADS + head) * tokens + token)
    cell = tl.load(stack + at, mask=there & (at >= 0) & (at < room), other=_NONE)
    slot = tl.load(slots + token, mask=there, other=0).to(tl.int64)
    tl.store(table + layer * stride_layer + slot * HEADS + head, cell, mask=there)
    # The program that comes last changes the height: every thread of every program has read it by then.
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1)
    last = tl.atomic_add(counters + _TICKET, tl.full([], 1, tl.int64)) == programs - 1
    tl.store(counters + _TICKET, tl.full([], 0, tl.int64), mask=last)
    tl.store(counters + _FREE, tl.maximum(free - need, 0), mask=last)
    _add_fault(counters, tl.full([], _UNDERFLOW, tl.int64), last & (free < need))


def take_cells(table: torch.Tensor, slots: torch.Tensor, stack: torch.Tensor, counters: torch.Tensor) -> None:
    """Give each of `slots` a cell in every layer and head, off the top of the free stack.

    Head-major: the cells of one (layer, head) are consecutive stack entries, the n-th slot's the n-th from its top.

    table: int32 `[L, S, H]`, the cell table with dense slots; changed. slots: int `[T]`, distinct, without cells.
    stack: int32 `[N]`, free cells below `counters[FREE]`. counters: int64 `[COUNTERS]`; when fewer cells are free than
    wanted, the last ones get none, `FREE` becomes 0 and `UNDERFLOW` is flagged.
    """
    layers, _, heads = table.shape
    if not slots.numel():
        return
    grid = (triton.cdiv(slots.numel() * heads, PAIRS), layers)
    _take_kernel[grid](
        table, slots, stack, counters, slots.numel(), layers, stack.numel(), table.stride(0),
        HEADS=heads, PAIRS=PAIRS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _free_kernel(
    table, slots, stack, counters, req_to_token, tokens, room, stride_layer, stride_row,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, SETTLE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(1).to(tl.int64)
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    token, head = pair // HEADS, pair % HEADS
    there = token < tokens
    slot = tl.load(slots + token, mask=there, other=0).to(tl.int64)
    if PLACES:
        position = tl.load(slots + tokens + token, mask=there, other=0)
        slot = tl.load(req_to_token + slot * stride_row + position, mask=there, other=0).to(tl.int64)
    at = table + layer * stride_layer + slot * HEADS + head
    lowest = _CONDEMNED if SETTLE else 0
    going = there & (tl.load(at, mask=there, other=_NONE) >= lowest)
    # Exchanged, so that of a slot given twice only one takes the cell.
    entry = tl.atomic_xchg(at, tl.full([PAIRS], _NONE, tl.int32), mask=going)
    going = going & (entry >= lowest)
    gone = going.to(tl.int32)
    count = tl.sum(gone, axis=0).to(tl.int64)
    base = tl.atomic_add(counters + _FREE, count)
    target = base + tl.cumsum(gone, axis=0) - gone
    tl.store(stack + target, entry & _CELL_MASK, mask=going & (target < room))
    _add_fault(counters, tl.full([], _OVERFLOW, tl.int64), base + count > room)
    if SETTLE:
        tl.atomic_add(counters + _PRUNED, count)


def free_cells(
    table: torch.Tensor,
    slots: torch.Tensor,
    stack: torch.Tensor,
    counters: torch.Tensor,
    *,
    settle: bool,
    req_to_token: torch.Tensor | None = None,
) -> None:
    """Put the cells of `slots` back on the free stack: all of them, or when settling the condemned ones only.

    table: int32 `[L, S, H]` with dense slots; the entries become `NONE`. slots: int `[T]`, duplicates allowed. With
    req_to_token, int32 `[R, context]`: contiguous int `[2, T]`, rows of it and positions in them, which name the slots.
    stack: int32 `[N]`, in no particular order afterwards. counters: int64 `[COUNTERS]`: `FREE` grows, with `settle` also
    `PRUNED`; `OVERFLOW` is flagged, and nothing stored out of bounds, when more are freed than the stack holds.
    """
    layers, _, heads = table.shape
    tokens = slots.shape[-1]
    if not tokens:
        return
    rows = slots if req_to_token is None else req_to_token
    _free_kernel[(triton.cdiv(tokens * heads, PAIRS), layers)](
        table, slots, stack, counters, rows, tokens, stack.numel(), table.stride(0), rows.stride(0),
        HEADS=heads, PAIRS=PAIRS, SETTLE=settle, PLACES=req_to_token is not None, num_warps=4,
    )  # fmt: skip
