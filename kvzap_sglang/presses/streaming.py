"""StreamingLLM's policy (arXiv 2309.17453): the window and the sinks stay, everything else goes."""

from __future__ import annotations

import torch

from kvzap_sglang.presses.base import LayerInput


class StreamingPress:
    """Every pair scores 0; the threshold is +inf, so all but sinks are condemned."""

    digest = "streaming"

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def score(self, layer: int, inputs: LayerInput) -> torch.Tensor:
        return inputs.positions.new_zeros((len(inputs.positions), self._heads), dtype=torch.float32)
