"""Greedy answers over a masked context, all policies at once: they share the context and differ in what they see of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from kvzap_sglang.evaluate.offline.context import Context
from kvzap_sglang.lent_attention import attending_by


@torch.no_grad()
def answer(
    model: Any, context: Context, kept: Tensor, question: Sequence[int], new_tokens: int, stops: Collection[int]
) -> list[list[int]]:
    """Up to `new_tokens` ids for each policy, ended by one of `stops` (which is left out).

    `kept`: bool `[B, L, H, n]`, one row for each policy. `question` is not empty.
    """
    rows = len(kept)
    asked = _Asked(context, kept)
    tokens = torch.tensor([list(question)]).expand(rows, -1)
    position = len(context)
    answers: list[list[int]] = [[] for _ in range(rows)]
    going = [True] * rows
    for _ in range(new_tokens):
        positions = torch.arange(position, position + tokens.shape[1]).expand(rows, -1)
        with attending_by(model, asked.attend):
            hidden = model.base_model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        position += tokens.shape[1]
        best = model.get_output_embeddings()(hidden[:, -1]).argmax(dim=-1)
        for row, token in enumerate(best.tolist()):
            going[row] = going[row] and token not in stops
            if going[row]:
                answers[row].append(token)
        if not any(going):
            break
        tokens = best[:, None]
    return answers


class _Asked:
    """Keys and values of the question and the answers so far, `[B, H, m, d]` of each layer."""

    def __init__(self, context: Context, kept: Tensor) -> None:
        self.context = context
        self.hidden_from = ~kept
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if layer in self.keys:
            key = torch.cat([self.keys[layer], key], dim=2)
            value = torch.cat([self.values[layer], value], dim=2)
        self.keys[layer], self.values[layer] = key, value
        rows, heads, own, dim = key.shape
        n = query.shape[2]
        grouped = (query * scaling).view(rows, heads, -1, n, dim)
        past = _by_head(grouped, self.context.keys[layer].transpose(-1, -2))
        past = past.masked_fill(self.hidden_from[:, layer, :, None, None], -math.inf)
        recent = grouped @ key[:, :, None].transpose(-1, -2)
        future = torch.ones(n, own, dtype=torch.bool).triu_(own - n + 1)
        weights = torch.cat([past, recent.masked_fill(future, -math.inf)], dim=-1).softmax(dim=-1)
        seen, new = weights.split([len(self.context), own], dim=-1)
        out = _by_head(seen, self.context.values[layer]) + new @ value[:, :, None]
        return out.reshape(rows, -1, n, dim)


def _by_head(rows: Tensor, shared: Tensor) -> Tensor:
    """`[B, H, g, n, a] @ [H, a, b]`: one product a head, since a broadcast one would copy `shared` for every row."""
    batch, heads, group, n, width = rows.shape
    product = rows.transpose(0, 1).reshape(heads, -1, width) @ shared
    return product.view(heads, batch, group, n, -1).transpose(0, 1)
