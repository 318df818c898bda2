"""Random pruning: the floor that any scoring policy must beat at the same removed fraction."""

from __future__ import annotations

import torch

from kvzap_sglang.presses.base import LayerInput

# Odd 62-bit constants that spread consecutive integers; int64 products wrap, which is wanted.
_TOKEN, _POSITION, _LAYER, _HEAD = (
    0x1E3779B97F4A7C15,
    0x3F58476D1CE4E5B9,
    0x14D049BB133111EB,
    0x2545F4914F6CDD1D,
)


class RandomPress:
    """Score `ln u`, u uniform in (0, 1] and a function of (token id, position, layer, head) only.

    Hence `P(score < T) = exp(T)`, and equal prefixes keep equal sets.
    """

    digest = "random"

    def __init__(self, heads: int, first_head: int = 0) -> None:
        self._heads, self._first_head = heads, first_head

    def score(self, layer: int, inputs: LayerInput) -> torch.Tensor:
        heads = torch.arange(self._first_head, self._first_head + self._heads, device=inputs.positions.device)
        token = inputs.token_ids.to(torch.int64) * _TOKEN + inputs.positions.to(torch.int64) * _POSITION
        mixed = _mix(_mix(token[:, None] + _wrapped((layer + 1) * _LAYER)) + (heads + 1)[None, :] * _HEAD)
        uniform = ((mixed & 0xFFFFFFFF).double() + 1.0) / 4294967296.0
        return uniform.log().float()


def _wrapped(x: int) -> int:
    """A Python integer as int64 arithmetic would leave it: torch refuses larger ones."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble int64 (shift-multiply rounds; the shift is masked to be logical)."""
    for constant in (_POSITION, _LAYER):
        x = (x ^ ((x >> 31) & 0x1FFFFFFFF)) * constant
    return x ^ ((x >> 33) & 0x7FFFFFFF)
