"""The online softmax that decode and extend attention share."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634
"""Scores are scaled by it, so that the kernels' exponentials are powers of two."""


@triton.jit
def attend_block(query, key, value, seen, peak, mass, total, scale_log2e):
    """One block of keys: query `[M, D]`, key `[D, N]`, value `[N, D]`, seen `[M, N]`."""
    score = tl.dot(query, key, input_precision="ieee") * scale_log2e
    score = tl.where(seen, score, float("-inf"))
    highest = tl.maximum(peak, tl.max(score, 1))
    # A row that has seen nothing yet has no peak: exp2(-inf - -inf) would be NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    shrink, weight = tl.exp2(peak - base), tl.exp2(score - base[:, None])
    mass = mass * shrink + tl.sum(weight, 1)
    total = total * shrink[:, None]
    total += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return highest, mass, total
