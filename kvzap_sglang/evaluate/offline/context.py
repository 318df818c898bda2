"""A context's keys, values and hidden states, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvzap_sglang.lent_attention import attending_by, dense_attention


@dataclass
class Context:
    """`keys`, `values`: of each layer, `[H, n, d]`, keys rotated. `hidden`: of each layer, the input of attention `[n, D]`."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return self.keys[0].shape[1]


@torch.no_grad()
def compute_context(model: Any, ids: Sequence[int]) -> Context:
    """Run `ids` densely through a transformers model in eval mode on the CPU."""
    context = Context()

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        context.keys.append(key[0])
        context.values.append(value[0])
        return dense_attention(query, key, value, scaling)

    with attending_by(model, attend, on_hidden=lambda hidden: context.hidden.append(hidden[0])):
        model.base_model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return context
