"""How far a pruned model's continuation is from the unpruned one's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def token_match(reference: Sequence[int], other: Sequence[int]) -> float:
    """Length of the common start of two greedy continuations, as a fraction of the reference's length."""
    same = next((i for i, (a, b) in enumerate(zip(reference, other, strict=False)) if a != b), len(other))
    return min(same, len(reference)) / len(reference) if reference else 1.0


def kl_divergence(reference: Sequence[Mapping[int, float]], other: Sequence[Mapping[int, float]]) -> float:
    """Mean KL(reference || other) in nats over the steps, from the best alternatives' log-probabilities.

    Tokens that are in both lists are told apart, all others are one event: a lower bound of the full divergence, since
    joining events never raises it.
    """
    steps = [_step(p, q) for p, q in zip(reference, other, strict=False)]
    return sum(steps) / len(steps) if steps else 0.0


def _step(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    common = p.keys() & q.keys()
    total = sum(math.exp(p[token]) * (p[token] - q[token]) for token in common)
    rest_p, rest_q = (max(1.0 - sum(math.exp(each[token]) for token in common), 1e-12) for each in (p, q))
    return max(0.0, total + rest_p * math.log(rest_p / rest_q))
