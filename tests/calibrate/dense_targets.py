"""KVzip(+) scores the slow and obvious way: every attention weight, then the formula as the paper has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvzap_sglang.calibrate.prompts import RepeatPrompt


@torch.no_grad()
def dense_targets(model: Any, prompt: RepeatPrompt, plus: bool) -> Tensor:
    """float32 `[p, L, H]` by transformers' eager attention; nothing is shared with the code under test."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        seen = model.base_model(torch.tensor([prompt.ids]), output_attentions=True, output_hidden_states=True)
    finally:
        model.set_attn_implementation(before)
    layers = [_layer(model, prompt, plus, seen, index) for index in range(model.config.num_hidden_layers)]
    return torch.stack(layers, dim=1)


def _layer(model: Any, prompt: RepeatPrompt, plus: bool, seen: Any, index: int) -> Tensor:
    layer = model.base_model.layers[index]
    weights = seen.attentions[index][0, :, list(prompt.repeated)][:, :, list(prompt.context)]
    heads, size = model.config.num_key_value_heads, layer.self_attn.head_dim
    group = len(weights) // heads
    if plus:
        hidden = layer.input_layernorm(seen.hidden_states[index])[0]
        values = layer.self_attn.v_proj(hidden).view(len(hidden), heads, size)[list(prompt.context)]
        scaled = []
        for query_head, head_weights in enumerate(weights):
            columns = layer.self_attn.o_proj.weight[:, query_head * size : (query_head + 1) * size]
            outputs = values[:, query_head // group] @ columns.T
            rows = hidden[list(prompt.repeated)].norm(dim=-1)
            scaled.append(head_weights * outputs.norm(dim=-1)[None, :] / rows[:, None])
        weights = torch.stack(scaled)
    return weights.amax(dim=1).view(heads, group, -1).amax(dim=1).log().T
