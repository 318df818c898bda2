"""Hooks on what the server tells: meta_info, /server_info, usage gauges."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvzap_sglang.hooks.arguments import config_of
from kvzap_sglang.hooks.scheduling import runtime_of
from kvzap_sglang.memory.allocator import KVPressAllocator
from kvzap_sglang.observe.server_info import server_info

INFO_KEY = "kv_press"


def output_streamer_class(result: type, scheduler: Any) -> type:
    """A streamer that adds `meta_info["kv_press"]` when a request ends."""
    if config_of(scheduler.server_args) is None:
        return result
    from kvzap_sglang.observe.output_streamer import press_streamer

    return press_streamer(result)


def update_request_meta_info(
    original: Callable[..., Any],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, Any],
    index: int,
    finish_reason: Any,
) -> None:
    """Put a request's press statistics into `meta_info` as one object, not as a per-token list."""
    others = {key: values for key, values in customized_info.items() if key != INFO_KEY}
    original(manager, meta_info, state, others, index, finish_reason)
    values = customized_info.get(INFO_KEY)
    if values is not None and values[index] is not None:
        meta_info[INFO_KEY] = values[index]


def add_internal_state(result: Any, controller: Any, state: dict[str, Any]) -> None:
    runtime = runtime_of(controller.scheduler)
    config = config_of(controller.scheduler.server_args)
    if runtime is not None and config is not None:
        state[INFO_KEY] = server_info(config, runtime)


def log_line_stats(result: Any, observer: Any) -> Any:
    """Add the press to SGLang's "Prefill batch" and "Decode batch" lines."""
    allocator = observer.token_to_kv_pool_allocator
    if not isinstance(allocator, KVPressAllocator):
        return None
    from kvzap_sglang.observe.log_line import with_press

    return with_press(result, allocator)


def physical_usage(result: Any, observer: Any) -> Any:
    """Report the fuller of slots and cells: low slot usage means nothing when cells are out."""
    allocator = observer.token_to_kv_pool_allocator
    if not isinstance(allocator, KVPressAllocator):
        return None
    layout = allocator.cells.layout
    free = allocator.available_cells() + observer.tree_cache.evictable_cells
    usage = 1.0 - min(free, layout.cells_total) / layout.cells_total
    return dataclasses.replace(result, full_token_usage=max(result.full_token_usage, usage))
