"""How well a surrogate predicts held-out targets, and what a threshold on it removes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_STEP = 0.5  # of the threshold table
_FINE_STEP = 0.1  # of the default threshold
_TABLE_RANGE = (0.02, 0.98)  # removed fractions that the table covers


class Predictions(NamedTuple):
    """Held-out tokens: float32 `[N, L, H]` each, natural log; `kinds`: of each token's text, N of them."""

    predicted: Tensor
    targets: Tensor
    kinds: Sequence[str]


def r_squared(predicted: Tensor, targets: Tensor) -> Tensor:
    """Squared Pearson correlation over the tokens, float64 `[L, H]` (the paper's R^2)."""
    x, y = predicted.double(), targets.double()
    x, y = x - x.mean(0), y - y.mean(0)
    return (x * y).sum(0).square() / (x.square().sum(0) * y.square().sum(0)).clamp_min(1e-300)


def report(predictions: Predictions, removed: float) -> dict[str, Any]:
    """R^2 in all its divisions, the threshold table, and the threshold that removes about `removed` of the decided pairs."""
    predicted, targets, kinds = predictions
    by_head = r_squared(predicted, targets)
    by_kind = {}
    for kind in sorted(set(kinds)):
        rows = torch.tensor([each == kind for each in kinds])
        by_kind[kind] = round(r_squared(predicted[rows], targets[rows]).mean().item(), 4)
    return {
        "r2": round(by_head.mean().item(), 4),
        "r2_per_kind": by_kind,
        "r2_per_layer": [round(value, 4) for value in by_head.mean(1).tolist()],
        "r2_per_head": [[round(value, 4) for value in row] for row in by_head.tolist()],
        "thresholds": threshold_table(predicted, targets),
        "default_threshold": threshold_removing(predicted, removed),
    }


def threshold_table(predicted: Tensor, targets: Tensor) -> list[dict[str, Any]]:
    """For each threshold: the fraction removed, overall and by layer; the fraction the target itself would remove; and
    the fraction of decisions in which the two agree. No window is applied: these are fractions of decided pairs."""
    low, high = (threshold_removing(predicted, fraction, _STEP) for fraction in _TABLE_RANGE)
    rows = []
    for index in range(round((high - low) / _STEP) + 1):
        threshold = low + index * _STEP
        ours, theirs = predicted < threshold, targets < threshold
        rows.append(
            {
                "threshold": threshold,
                "removed": round(ours.double().mean().item(), 4),
                "target_removed": round(theirs.double().mean().item(), 4),
                "agreement": round((ours == theirs).double().mean().item(), 4),
                "removed_per_layer": [round(value, 4) for value in ours.double().mean((0, 2)).tolist()],
            }
        )
    return rows


def threshold_removing(predicted: Tensor, fraction: float, step: float = _FINE_STEP) -> float:
    """The multiple of `step` nearest to the `fraction` quantile of all scores."""
    scores = predicted.flatten().sort().values
    quantile = scores[min(math.floor(fraction * len(scores)), len(scores) - 1)].item()
    return round(round(quantile / step) * step, 6)
