"""Every registration and hook of the plugin, as one table. No logic.

SGLang loads this through the entry point `sglang.srt.plugins` in every process, before arguments
are parsed. Hooks return to the original at once when the server runs without `--kv-press`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvzap_sglang.hooks import arguments, memory, model, report, scheduling

BACKEND = "kvzap"
"""Name under which attention backend and radix cache are registered."""


class Hook(NamedTuple):
    """One method hook: where, how, what."""

    target: str
    kind: HookType
    function: Callable[..., Any]


_KV = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner."
_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner."
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder."
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_PARTS = "sglang.srt.managers.scheduler_components."
_RESULTS = _PARTS + "batch_result_processor.SchedulerBatchResultProcessor."
_WEIGHTS = _PARTS + "weight_updater.SchedulerWeightUpdaterManager."

HOOKS: tuple[Hook, ...] = (
    # flags
    Hook("sglang.srt.server_args.ServerArgs.add_cli_args", HookType.AFTER, arguments.add_cli_args),
    Hook("sglang.srt.server_args.ServerArgs.from_cli_args", HookType.AROUND, arguments.from_cli_args),
    # memory
    Hook(_KV + "_resolve_memory_pool_config", HookType.AROUND, memory.virtual_capacity),
    Hook(_KV + "_build_mha_kv_pool", HookType.AROUND, memory.build_pool),
    Hook(_KV + "_build_token_to_kv_pool_allocator", HookType.AROUND, memory.build_allocator),
    # model
    Hook(_RUNNER + "load_model", HookType.AFTER, model.attach_press),
    Hook(_RUNNER + "forward", HookType.AROUND, model.forward),
    Hook(_RUNNER + "sample", HookType.AFTER, model.attach_decisions),
    Hook(_GRAPHS + "can_run_graph", HookType.AFTER, model.can_run_graph),
    # scheduling
    Hook(_SCHEDULER + "run_batch", HookType.AROUND, scheduling.run_batch),
    Hook(_SCHEDULER + "_get_new_batch_prefill_raw", HookType.AROUND, scheduling.next_prefill),
    Hook(_SCHEDULER + "update_running_batch", HookType.AROUND, scheduling.update_running),
    Hook(_SCHEDULER + "_create_generation_req", HookType.AROUND, scheduling.create_request),
    Hook(_ADDER + "add_one_req", HookType.AROUND, scheduling.add_one_req),
    Hook(_ADDER + "add_chunked_req", HookType.AROUND, scheduling.add_chunked_req),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        HookType.AROUND,
        scheduling.validate_request,
    ),
    Hook(_RESULTS + "process_batch_result_prefill", HookType.AROUND, scheduling.process_result),
    Hook(_RESULTS + "process_batch_result_decode", HookType.AROUND, scheduling.process_result),
    Hook(_WEIGHTS + "update_weights_from_disk", HookType.AROUND, scheduling.refuse_weight_update),
    Hook(_WEIGHTS + "update_weights_from_distributed", HookType.AROUND, scheduling.refuse_weight_update),
    Hook(_WEIGHTS + "update_weights_from_tensor", HookType.AROUND, scheduling.refuse_weight_update),
    Hook(_WEIGHTS + "update_weights_from_ipc", HookType.AROUND, scheduling.refuse_weight_update),
    Hook(_WEIGHTS + "begin_weight_update", HookType.AROUND, scheduling.refuse_weight_update),
    Hook(_WEIGHTS + "init_weights_update_group", HookType.AROUND, scheduling.refuse_weight_update),
    # reports
    Hook(_SCHEDULER + "get_output_streamer_class", HookType.AFTER, report.output_streamer_class),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        HookType.AROUND,
        report.update_request_meta_info,
    ),
    Hook(
        _PARTS + "internal_state.SchedulerInternalStateController._add_memory_usage",
        HookType.AFTER,
        report.add_internal_state,
    ),
    Hook(
        _PARTS + "pool_stats_observer.SchedulerPoolStatsObserver._get_token_info",
        HookType.AFTER,
        report.physical_usage,
    ),
    Hook(
        _PARTS + "pool_stats_observer.SchedulerPoolStatsObserver.get_pool_stats",
        HookType.AFTER,
        report.log_line_stats,
    ),
)


def register() -> None:
    """Entry point. A failure here ends the process: SGLang's loader would only log it."""
    try:
        _register()
    except Exception as error:
        raise SystemExit(f"kvzap-sglang could not be installed into SGLang: {error!r}") from error


def _register() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.kind)
    choices.add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(model.build_attention_backend)
    register_radix_cache_backend(BACKEND, memory.build_radix_cache)
    register_resolution_hook("handle_missing_default_values")(arguments.choose_backends)
    register_resolution_hook("handle_other_validations")(arguments.validate)
