"""What a press is: a scoring policy for new (layer, head) pairs."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class LayerInput(NamedTuple):
    """A layer's new tokens.

    hidden: `[n, hidden_size]`, the `hidden_states` argument of `self_attn` (after `input_layernorm`).
    positions: int64 `[n]`. token_ids: int64 `[n]`.
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor


class Press(Protocol):
    """Scores are on the natural-log scale; a pair is condemned when `score < threshold`."""

    digest: str
    """Identity of the policy and its weights: equal digests score equally."""

    def score(self, layer: int, inputs: LayerInput) -> torch.Tensor:
        """Scores `[n, heads]` of this rank's KV heads, any floating dtype."""
        ...
