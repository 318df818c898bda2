"""What to keep of a context, as bool `[L, H, n]`. Scores are float32 `[L, H, n]`, natural log."""

from __future__ import annotations

import torch
from torch import Tensor


def by_threshold(scores: Tensor, threshold: float) -> Tensor:
    """The product's rule: every pair for itself."""
    return ~(scores < threshold)


def by_top_k(scores: Tensor, removed: float, window: int) -> Tensor:
    """The same number of pairs in every layer and head: the best by score, so that `removed` of all pairs go.

    The last `window` tokens are kept whatever their scores, as by every policy, and count among those kept.
    """
    layers, heads, n = scores.shape
    outside = max(0, n - window)
    count = min(outside, max(0, round((1 - removed) * n) - (n - outside)))
    best = scores[..., :outside].topk(count, dim=-1).indices
    return torch.zeros(layers, heads, n, dtype=torch.bool).scatter_(-1, best, True)


def by_chance(shape: torch.Size, removed: float, window: int, sinks: int, generator: torch.Generator) -> Tensor:
    """Pairs outside window and sinks go with the probability at which `removed` of all do."""
    n = shape[-1]
    probability = min(1.0, removed * n / max(1, n - window - sinks))
    kept = torch.rand(shape, generator=generator) >= probability
    kept[..., :sinks] = True
    return kept


def by_recency(shape: torch.Size, removed: float, sinks: int) -> Tensor:
    """StreamingLLM: sinks, and the most recent tokens that make up the rest."""
    n = shape[-1]
    recent = max(0, round((1 - removed) * n) - sinks)
    kept = torch.zeros(shape, dtype=torch.bool)
    kept[..., :sinks] = True
    kept[..., n - recent :] = True
    return kept


def with_protected(kept: Tensor, window: int, sinks: int) -> Tensor:
    """`kept`, and the first `sinks` and the last `window` tokens."""
    kept = kept.clone()
    kept[..., :sinks] = True
    kept[..., max(0, kept.shape[-1] - window) :] = True
    return kept
