"""The second half of an MLP surrogate in one pass: exact GELU, output layer, and the scores where they are wanted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, WIDTH = 32, 64
"""Tokens of a program, hidden units of an iteration."""
_SQRT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def _score_kernel(
    hidden, weight, bias, out, tokens, units, stride_hidden, stride_out,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.arange(0, HEADS_PADDED)
    there, is_head = token < tokens, head < HEADS
    row = token.to(tl.int64)
    total = tl.zeros([ROWS, HEADS_PADDED], tl.float32)
    for start in range(0, units, WIDTH):
        unit = start + tl.arange(0, WIDTH)
        inside = unit < units
        x = tl.load(
            hidden + row[:, None] * stride_hidden + unit[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        wide = x.to(tl.float32)
        active = 0.5 * wide * (1.0 + tl.erf(wide * _SQRT_HALF))
        w = tl.load(weight + head[None, :] * units + unit[:, None], mask=is_head[None, :] & inside[:, None], other=0.0)
        # Rounded to the model's dtype, as between two layers of the reference.
        total += tl.dot(active.to(x.dtype), w, input_precision="ieee")
    total += tl.load(bias + head, mask=is_head, other=0.0).to(tl.float32)[None, :]
    at = out + row[:, None] * stride_out + head[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=there[:, None] & is_head[None, :])


def mlp_scores(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """Scores of T tokens from the pre-activations of an MLP surrogate's hidden layer, into `out`.

    hidden: `[T, U]` with dense units. weight: `[H, U]`, contiguous; bias `[H]`; all of one dtype. out: `[T, H]` of that
    dtype, dense heads. GELU is the exact one (erf), fp32; sums are fp32.
    """
    tokens, units = hidden.shape
    heads = weight.shape[0]
    if not tokens:
        return
    _score_kernel[(triton.cdiv(tokens, ROWS),)](
        hidden, weight, bias, out, tokens, units, hidden.stride(0), out.stride(0), HEADS=heads,
        HEADS_PADDED=max(16, triton.next_power_of_2(heads)), ROWS=ROWS, WIDTH=WIDTH, num_warps=4,
    )  # fmt: skip
