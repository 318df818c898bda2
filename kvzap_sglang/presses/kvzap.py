"""KVzap: a surrogate per layer predicts the KVzip+ score from the layer's input (arXiv 2601.07891)."""

from __future__ import annotations

import torch

from kvzap_sglang.presses.base import LayerInput
from kvzap_sglang.presses.surrogate import Surrogate


class KVzapPress:
    """Scores `ln s+` in the model's dtype, as the reference does."""

    def __init__(self, surrogate: Surrogate) -> None:
        self.surrogate = surrogate
        self.digest = f"kvzap-{surrogate.digest}"

    def score(self, layer: int, inputs: LayerInput) -> torch.Tensor:
        return self.surrogate.score(layer, inputs.hidden)

    def score_into(self, layer: int, inputs: LayerInput, out: torch.Tensor) -> None:
        """As `score`, into `out`, `[n, heads]` of the surrogate's dtype, by a GPU kernel where one saves a pass."""
        self.surrogate.score_into(layer, inputs.hidden, out)
