"""Hooks on the model runner (forward stream)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from kvzap_sglang.attach import build_press, wrap_layers
from kvzap_sglang.hooks.arguments import config_of
from kvzap_sglang.hooks.carried import carried_decisions, carry_decisions
from kvzap_sglang.presses.base import LayerInput, Press
from kvzap_sglang.presses.kvzap import KVzapPress
from kvzap_sglang.ranks import gather_reports

logger = logging.getLogger(__name__)


def attach_press(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """After load, before the memory profile: surrogate weights are charged to it."""
    config = config_of(runner.server_args)
    if config is None:
        return
    runner.kv_press = build_press(config, runner)
    runner.kv_press_runtime = None
    if runner.device == "cpu" and runner.model_config.dtype == torch.bfloat16:
        speed_up_bf16(runner.model, runner.kv_press)

    def score(layer: int, inputs: LayerInput) -> None:
        runner.kv_press_runtime.step.score(layer, inputs)

    runner.kv_press_layers = wrap_layers(runner.model, score)


def speed_up_bf16(model: torch.nn.Module, press: Press) -> None:
    """The model's and the surrogate's layers, where this CPU has no bf16 arithmetic."""
    from kvzap_sglang.bf16_layers import cpu_lacks_bf16, replace_layers

    if not cpu_lacks_bf16():
        return
    replaced = replace_layers(model)
    if isinstance(press, KVzapPress):
        replaced += replace_layers(press.surrogate)
    logger.info("kv press: no bf16 instructions on this CPU, %d layers use our own kernels", replaced)


def build_attention_backend(runner: Any) -> Any:
    """Factory of the registered attention backend. Pools exist by now: the runtime starts here."""
    from sglang.srt.runtime_context import get_schedule

    from kvzap_sglang.attention.choice import attention_parts
    from kvzap_sglang.runtime import KVPressRuntime

    config = config_of(runner.server_args)
    if config is None:
        raise ValueError("--attention-backend kvzap is chosen by --kv-press: give that flag instead")
    parts = attention_parts(config, runner.device)
    runner.kv_press_runtime = KVPressRuntime(
        parts.step(config, runner),
        runner.token_to_kv_pool_allocator,
        runner.req_to_token_pool.req_to_token,
        config,
        result_lag=0 if get_schedule().disable_overlap_schedule else 1,
        gather=gather_reports(),
    )
    return parts.backend(runner, runner.kv_press_runtime)


def forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Drain and pop before, settle and report after."""
    runtime = getattr(runner, "kv_press_runtime", None)
    if runtime is None or forward_batch.forward_mode.is_idle():
        return original(runner, forward_batch, *args, **kwargs)
    runtime.begin(forward_batch.out_cache_loc)
    output = original(runner, forward_batch, *args, **kwargs)
    carry_decisions(forward_batch, runtime.end())
    return output


def attach_decisions(result: Any, runner: Any, logits_output: Any, forward_batch: Any) -> None:
    """Send the decisions to the CPU with the sampled tokens (asynchronous copy)."""
    decisions = carried_decisions(forward_batch)
    if decisions is None:
        return
    from sglang.srt.managers.auxiliary_output import append_auxiliary_output

    logits_output.auxiliary_device_output = append_auxiliary_output(logits_output.auxiliary_device_output, decisions)


def can_run_graph(result: bool, graph_runner: Any, forward_batch: Any) -> bool:
    """A decode batch whose visible lists do not fit the recorded step's buffers is run eagerly."""
    fits = getattr(graph_runner.model_runner.attn_backend, "fits_graph", None)
    return result and (fits is None or fits(forward_batch))
