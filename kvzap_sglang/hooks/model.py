"""Hooks on the model runner (forward stream)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvzap_sglang.attach import build_press, wrap_layers
from kvzap_sglang.hooks.arguments import config_of
from kvzap_sglang.hooks.carried import carried_decisions, carry_decisions
from kvzap_sglang.presses.base import LayerInput
from kvzap_sglang.ranks import gather_decisions


def attach_press(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """After load, before the memory profile: surrogate weights are charged to it."""
    config = config_of(runner.server_args)
    if config is None:
        return
    runner.kv_press = build_press(config, runner)
    runner.kv_press_runtime = None

    def score(layer: int, inputs: LayerInput) -> None:
        runner.kv_press_runtime.score(layer, inputs)

    runner.kv_press_layers = wrap_layers(runner.model, score)


def build_attention_backend(runner: Any) -> Any:
    """Factory of the registered attention backend. Pools exist by now: the runtime starts here."""
    from sglang.srt.runtime_context import get_schedule

    from kvzap_sglang.attention.cpu import KVPressCPUBackend
    from kvzap_sglang.runtime import KVPressRuntime

    config = config_of(runner.server_args)
    if config is None:
        raise ValueError("--attention-backend kvzap is chosen by --kv-press: give that flag instead")
    runner.kv_press_runtime = KVPressRuntime(
        runner.kv_press,
        runner.token_to_kv_pool_allocator,
        runner.req_to_token_pool.req_to_token,
        config,
        result_lag=0 if get_schedule().disable_overlap_schedule else 1,
        gather=gather_decisions(),
    )
    return KVPressCPUBackend(runner, runner.kv_press_runtime)


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
