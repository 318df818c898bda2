"""How much single heads keep: random draws with the spread that was measured.

Measured with the real kvpress on SmolLM2-135M-Instruct (tests/data/kvpress_smollm2.json, the prompt of 1260
tokens, 30 layers of 3 KV heads, positions that had left the window):

| surrogate, threshold | mean kept | standard deviation over the heads | of the layers' means |
|---|---|---|---|
| mlp, -4 | 0.418 | 0.354 | 0.292 |
| linear, -3 | 0.259 | 0.339 | 0.265 |

Heads are spread over the whole range from nothing to all; 52 % and 42 % of the variance lie between layers. Other models'
spreads were not measured. Prompts differ little there (standard deviation of the mean 0.01 to 0.02): all requests of a
draw keep the same.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEVIATION, BETWEEN_LAYERS = 0.345, 0.5
"""Standard deviation over all heads; share of the variance that lies between layers."""

_SAMPLES, _HALVINGS = 1 << 14, 60


def kept_fractions(mean: float, layers: int, heads: int, seed: int) -> NDArray[np.float64]:
    """Kept fraction per head, `[layers, heads]`, of exactly this mean: beta-distributed, with the measured spread."""
    if mean >= 1:
        return np.ones((layers, heads))
    rng = np.random.default_rng(seed)
    variance = min(DEVIATION**2, 0.9 * mean * (1 - mean))
    weight = mean * (1 - mean) / variance - 1
    ordered = np.sort(rng.beta(mean * weight, (1 - mean) * weight, _SAMPLES))
    # Correlated normals give correlated ranks; the ranks pick from the sample.
    shared, own = rng.standard_normal((layers, 1)), rng.standard_normal((layers, heads))
    normal = math.sqrt(BETWEEN_LAYERS) * shared + math.sqrt(1 - BETWEEN_LAYERS) * own
    rank = 0.5 * (1 + np.vectorize(math.erf)(normal / math.sqrt(2)))
    return _with_mean(ordered[np.minimum((rank * _SAMPLES).astype(np.int64), _SAMPLES - 1)], mean)


def _with_mean(values: NDArray[Any], mean: float) -> NDArray[np.float64]:
    """The values of [0, 1], all to the power that gives them this mean."""
    low, high = 1e-3, 1e3
    for _ in range(_HALVINGS):
        power = math.sqrt(low * high)
        if float(np.mean(values**power)) > mean:
            low = power
        else:
            high = power
    return np.asarray(values ** math.sqrt(low * high), dtype=np.float64)
