"""KVzip and KVzip+ scores of a text's tokens: how much its repetition attends to each of them.

For KV head h with query heads q in its group, over the rows j of the repetition (KVzap, arXiv 2601.07891, eq. 1 and 3;
kvpress `kvzap/data.py`):

    KVzip :  ln max_q max_j a[q, j, i]
    KVzip+:  ln max_q max_j a[q, j, i] * |W_O[q] v[i]| / |h[j]|

a: attention after softmax over the whole extended prompt. W_O[q]: the columns of o_proj that belong to query head q,
without bias. h[j]: the input of self-attention, after the norm. Everything in logarithms and float32, so that a weight
that underflows still has its score.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvzap_sglang.calibrate.prompts import RepeatPrompt
from kvzap_sglang.lent_attention import attending_by, dense_attention

_ROW_BLOCK = 128  # rows of attention weights held at once: [query heads, block, extended prompt]


class LayerRecorder:
    """Collects, layer by layer, what one forward pass shows. `hidden`: `[p, D]` each; `targets`: float32 `[p, H]` each."""

    def __init__(self, prompt: RepeatPrompt, plus: bool) -> None:
        self.prompt, self.plus = prompt, plus
        self.hidden: list[Tensor] = []
        self.targets: list[Tensor] = []
        self._row_norms = torch.empty(0)

    def enter(self, hidden: Tensor) -> None:
        """Takes a layer's self-attention input, `[n, D]`."""
        context, repeated = self.prompt.context, self.prompt.repeated
        self.hidden.append(hidden[context.start : context.stop].clone())
        self._row_norms = hidden[repeated.start : repeated.stop].float().norm(dim=-1).log()

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        """Takes a layer's q `[Hq, n, d]` and k, v `[H, n, d]`, after rotation."""
        best = self._best_row(query, key, scaling)
        if self.plus:
            best += self._output_norms(module, value).log()
        self.targets.append(best.amax(dim=1).T.contiguous())

    def _best_row(self, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """float32 `[H, group, p]`: the largest log weight over the rows, less ln |h_j| for KVzip+."""
        context, repeated = self.prompt.context, self.prompt.repeated
        heads, n, dim = key.shape
        grouped = (query * scaling).view(heads, -1, n, dim)
        best = torch.full((*grouped.shape[:2], len(context)), -math.inf, device=query.device)
        for start in range(repeated.start, repeated.stop, _ROW_BLOCK):
            stop = min(start + _ROW_BLOCK, repeated.stop)
            weights = (grouped[:, :, start:stop] @ key[:, None, :stop].transpose(-1, -2)).float()
            future = torch.ones(stop - start, stop - start, dtype=torch.bool, device=query.device).triu_(1)
            weights[..., start:].masked_fill_(future, -math.inf)
            scale = weights.logsumexp(dim=-1, keepdim=True)
            if self.plus:
                scale += self._row_norms[start - repeated.start : stop - repeated.start, None]
            rows = weights[..., context.start : context.stop].sub_(scale).amax(dim=-2)
            torch.maximum(best, rows, out=best)
        return best

    def _output_norms(self, module: Any, value: Tensor) -> Tensor:
        """float32 `[H, group, p]`: |W_O[q] v_i|."""
        context = self.prompt.context
        heads, _, dim = value.shape
        weight = module.o_proj.weight.view(module.o_proj.weight.shape[0], heads, -1, dim)
        used = value[:, context.start : context.stop]
        norms = torch.empty(heads, weight.shape[2], len(context), device=value.device)
        for head in range(heads):
            for member in range(weight.shape[2]):
                norms[head, member] = (used[head] @ weight[:, head, member].T).float().norm(dim=-1)
        return norms


def repeat_targets(model: Any, prompt: RepeatPrompt, plus: bool = True) -> Tensor:
    """float32 `[p, L, H]`: ln of the KVzip+ (or KVzip) scores of the p context tokens. See `record`."""
    return torch.stack(record(model, prompt, plus).targets, dim=1)


@torch.no_grad()
def record(model: Any, prompt: RepeatPrompt, plus: bool = True) -> LayerRecorder:
    """Run `prompt` once through a transformers model in eval mode; attention weights are held block by block.

    Raises ValueError for a model whose layers do not all attend to the whole prompt.
    """
    check_model(model)
    recorder = LayerRecorder(prompt, plus)
    device = model.get_input_embeddings().weight.device

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        recorder.attend(model.base_model.layers[layer].self_attn, query[0], key[0], value[0], scaling)
        return dense_attention(query, key, value, scaling)

    with attending_by(model, attend, on_hidden=lambda hidden: recorder.enter(hidden[0])):
        model.base_model(input_ids=torch.tensor([prompt.ids], device=device), use_cache=False)
    return recorder


def check_model(model: Any) -> None:
    """Raises ValueError for a model that the scores are not defined for."""
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"scores are defined for full attention, the model has layers of type {sorted(kinds)}")
    layers = getattr(model.base_model, "layers", None)
    if layers is None or not hasattr(layers[0].self_attn, "o_proj"):
        raise ValueError(f"{type(model).__name__} has no layers[i].self_attn.o_proj, as Llama, Mistral and Qwen have")
