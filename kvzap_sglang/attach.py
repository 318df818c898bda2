"""Attaching a press to a loaded model: one wrapper around each layer's attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from kvzap_sglang.config import KVPressConfig
from kvzap_sglang.presses.base import LayerInput, Press
from kvzap_sglang.presses.kvzap import KVzapPress
from kvzap_sglang.presses.random import RandomPress
from kvzap_sglang.presses.streaming import StreamingPress

logger = logging.getLogger(__name__)

# Decoder layers of these call `self_attn(positions=, hidden_states=, forward_batch=)` with the
# output of `input_layernorm`, which is what a surrogate is trained on.
SUPPORTED_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class UnsupportedModel(ValueError):
    """The model's layers are not known to the press."""


def attention_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Each decoder layer's `self_attn`, in layer order. Raises `UnsupportedModel`."""
    name = type(model).__name__
    if name not in SUPPORTED_MODELS:
        raise UnsupportedModel(
            f"--kv-press does not know the layers of {name}: serve one of {', '.join(SUPPORTED_MODELS)}, "
            "or start without --kv-press"
        )
    layers: Any = model.get_submodule("model.layers")
    return [layer.self_attn for layer in layers]


def build_press(config: KVPressConfig, model_runner: Any) -> Press:
    """The press of this rank. Raises `SurrogateError` when the surrogate does not fit the model."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    model_config = model_runner.model_config
    heads = model_config.get_num_kv_heads(parallel.attn_tp_size)
    first = parallel.attn_tp_rank * heads
    if config.kv_press == "streaming":
        return StreamingPress(heads)
    if config.kv_press == "random":
        return RandomPress(heads, first)
    from kvzap_sglang.presses.surrogate import check_fits, load_surrogate

    surrogate = load_surrogate(config.surrogate, dtype=model_config.dtype, device=model_runner.device)
    check_fits(
        surrogate.config,
        hidden_size=model_config.hidden_size,
        num_layers=model_config.num_hidden_layers,
        num_kv_heads=model_config.get_total_num_kv_heads(),
        source=config.surrogate,
    )
    if parallel.attn_tp_size > 1:
        surrogate = surrogate.slice_heads(first, first + heads)
    return KVzapPress(surrogate)


def wrap_layers(model: torch.nn.Module, score: Callable[[int, LayerInput], None]) -> int:
    """Call `score(layer, inputs)` before each layer's attention. Returns the number of layers wrapped."""
    modules = attention_modules(model)
    for index, module in enumerate(modules):
        module.forward = _scored(module.forward, index, score)
    return len(modules)


def _scored(
    forward: Callable[..., torch.Tensor], layer: int, score: Callable[[int, LayerInput], None]
) -> Callable[..., torch.Tensor]:
    def scored_forward(
        positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not isinstance(hidden_states, torch.Tensor):
            raise UnsupportedModel(
                "--kv-press needs the layer input as a tensor, this checkpoint quantises it inside the norm: "
                "serve an unquantised checkpoint"
            )
        score(layer, LayerInput(hidden_states, positions, forward_batch.input_ids))
        return forward(positions=positions, hidden_states=hidden_states, forward_batch=forward_batch, **kwargs)

    return scored_forward
