"""What a step tells the CPU, as one buffer: the pool's counters, then the packed kept bits of its tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..counters import COUNTERS, HEADER_BYTES

_HEADER_BYTES, _COUNTERS = tl.constexpr(HEADER_BYTES), tl.constexpr(COUNTERS)
BYTES = 128
"""Packed bytes of a program."""


@triton.jit
def _report_kernel(kept, counters, out, pairs, width, total, BYTES: tl.constexpr):
    byte = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    token, column = (byte // width).to(tl.int64), (byte % width) * 8
    packed = tl.zeros([BYTES], tl.int32)
    for bit in tl.static_range(8):
        inside = (byte < total) & (column + bit < pairs)
        is_kept = tl.load(kept + token * pairs + column + bit, mask=inside, other=0) != 0
        # The first bit of a byte is its most significant one, as in `bits.pack_bits`.
        packed += is_kept.to(tl.int32) << (7 - bit)
    tl.store(out + _HEADER_BYTES + byte, packed.to(tl.uint8), mask=byte < total)
    if tl.program_id(0) == 0:
        number = tl.arange(0, _COUNTERS)
        tl.store(out.to(tl.pointer_type(tl.int64)) + number, tl.load(counters + number))


def step_report(kept: torch.Tensor, counters: torch.Tensor, out: torch.Tensor) -> None:
    """Write a step's report.

    kept: bool or int8 `[T, P]`, dense; P (layer, head) pairs, not 0 where kept. counters: int64 `[COUNTERS]`.
    out: uint8 `[report_bytes(T, P)]`, 8-byte aligned: the counters' bytes, then `pack_bits` of `kept`.
    """
    tokens, pairs = kept.shape
    width = (pairs + 7) // 8
    grid = (max(1, triton.cdiv(tokens * width, BYTES)),)
    _report_kernel[grid](kept.view(torch.int8), counters, out, pairs, width, tokens * width, BYTES=BYTES, num_warps=4)
