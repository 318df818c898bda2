"""Hooks on pool sizing and construction (scheduler process)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvzap_sglang.config import KVPressConfig
from kvzap_sglang.hooks.arguments import config_of
from kvzap_sglang.memory.layout import physical_tokens, side_bytes_per_cell, virtual_tokens

logger = logging.getLogger(__name__)


def virtual_capacity(original: Callable[..., Any], configurator: Any, *args: Any, **kwargs: Any) -> Any:
    """Let SGLang size the pool, then hand out `headroom` times as many token slots.

    What SGLang computed stays the physical room, less what the cell table and free stack take when
    the size came from the memory profile.
    """
    sizes = original(configurator, *args, **kwargs)
    config = config_of(configurator.server_args)
    if config is None:
        return sizes
    physical = _physical_tokens(configurator, config, sizes.max_total_num_tokens)
    sizes.max_total_num_tokens = virtual_tokens(physical, config.kv_press_headroom)
    sizes.max_running_requests = configurator.resolve_max_num_reqs(sizes.max_total_num_tokens)
    return sizes


def _physical_tokens(configurator: Any, config: KVPressConfig, tokens: int) -> int:
    from sglang.srt.runtime_context import get_schedule

    if get_schedule().max_total_tokens == tokens:
        return tokens
    model = configurator.model_config
    cell = (model.head_dim + model.v_head_dim) * configurator.kv_cache_dtype.itemsize
    return int(tokens * cell / (cell + side_bytes_per_cell(config.kv_press_headroom)))


def build_pool(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    config = config_of(configurator.server_args)
    if config is None:
        return original(configurator, **kwargs)
    from kvzap_sglang.attention.choice import attention_parts
    from kvzap_sglang.memory.kv_pool import KVPressPool

    cell_pool = attention_parts(config, configurator.device).cell_pool
    physical = physical_tokens(kwargs["max_total_num_tokens"], config.kv_press_headroom)
    kwargs["mha_pool_class"] = KVPressPool.sized(physical, cell_pool)
    return original(configurator, **kwargs)


def build_allocator(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    if config_of(configurator.server_args) is None:
        return original(configurator, **kwargs)
    from kvzap_sglang.memory.allocator import KVPressAllocator

    return KVPressAllocator(
        kwargs["sizes"].max_total_num_tokens,
        dtype=configurator.kv_cache_dtype,
        device=configurator.device,
        kvcache=kwargs["token_to_kv_pool"],
        need_sort=False,
    )


def build_radix_cache(context: Any) -> Any:
    """Factory of the registered radix cache: the last object of a scheduler to be built."""
    from kvzap_sglang.guard import self_check
    from kvzap_sglang.observe.startup import log_startup
    from kvzap_sglang.radix_cache import KVPressRadixCache
    from kvzap_sglang.ranks import set_shape

    config = config_of(context.server_args)
    if config is None:
        raise ValueError("--radix-cache-backend kvzap is chosen by --kv-press: give that flag instead")
    runner = context.tp_worker.model_runner
    layout = runner.kv_press_runtime.cells.layout
    tree = KVPressRadixCache(context.params, config, set_shape(layout.cells_per_token), layout.layers)
    runner.kv_press_runtime.attach_tree(tree)
    self_check(config, runner, tree)
    log_startup(config, runner)
    return tree
