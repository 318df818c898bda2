"""What SGLang may call on us we accept, and what we hook is there: differences that would show under pressure only."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.plugins.hook_registry import HookType

from kvzap_sglang.attention.cpu import KVPressCPUBackend
from kvzap_sglang.memory.allocator import KVPressAllocator
from kvzap_sglang.memory.budget import KVPressPrefillBudget
from kvzap_sglang.memory.kv_pool import KVPressPool
from kvzap_sglang.plugin import HOOKS, Hook
from kvzap_sglang.radix_cache import KVPressRadixCache

PAIRS = [
    (KVPressAllocator, TokenToKVPoolAllocator),
    (KVPressPool, MHATokenToKVPool),
    (KVPressRadixCache, RadixCache),
    (KVPressPrefillBudget, PrefillBudget),
    (KVPressCPUBackend, AttentionBackend),
]

# Public methods of SGLang's pool that mean the same for us: sizes, names, switches.
POOL_METHODS_THAT_HOLD = {
    "get_kv_size_bytes",
    "get_v_head_dim",
    "get_kv_cache_quant_method",
    "maybe_get_custom_mem_pool",
    "register_layer_transfer_counter",
}
# Of quantised caches only: without one they raise by themselves.
POOL_METHODS_OF_QUANTISED_CACHES = {
    "get_dequant_workspace",
    "get_flashinfer_dequant_workspace_kv_buffer",
    "get_flashinfer_decode_dequant_workspace_kv_buffer",
}


def overrides(ours: type, base: type) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Methods of `base` that `ours` defines again."""
    for name, function in vars(ours).items():
        inherited = getattr(base, name, None)
        if name != "__init__" and inspect.isfunction(function) and inspect.isfunction(inherited):
            yield name, function, inherited


def calls(function: Callable[..., Any]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The ways to call `function` with all it takes: as many arguments as possible by position, and by name."""
    parameters = list(inspect.signature(function).parameters.values())
    receiver, rest = [parameters[0].name], parameters[1:]
    positional = [p.name for p in rest if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = {p.name: p.name for p in rest if p.kind is p.KEYWORD_ONLY}
    yield receiver + positional, named
    yield receiver, {name: name for name in positional} | named


@pytest.mark.parametrize(("ours", "base"), PAIRS, ids=[ours.__name__ for ours, _ in PAIRS])
def test_overrides_accept_what_their_bases_accept(ours: type, base: type) -> None:
    checked = 0
    for name, function, inherited in overrides(ours, base):
        for given, named in calls(inherited):
            try:
                inspect.signature(function).bind(*given, **named)
            except TypeError as error:
                pytest.fail(f"{ours.__name__}.{name}({', '.join(given)}, {named}): {error}")
            checked += 1
    assert checked >= 6


@pytest.mark.parametrize(("ours", "base"), PAIRS, ids=[ours.__name__ for ours, _ in PAIRS])
def test_properties_stay_properties(ours: type, base: type) -> None:
    for name in vars(ours).keys() & set(dir(base)):
        assert isinstance(vars(ours)[name], property) == isinstance(inspect.getattr_static(base, name), property), name


def test_a_narrower_override_is_seen() -> None:
    class Narrow(TokenToKVPoolAllocator):
        def get_cpu_copy(self, indices: Any) -> None: ...

    with pytest.raises(pytest.fail.Exception, match=r"get_cpu_copy.*mamba_indices"):
        test_overrides_accept_what_their_bases_accept(Narrow, TokenToKVPoolAllocator)


def public_methods(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls, inspect.isroutine) if not name.startswith("_")}


@pytest.fixture
def pool() -> KVPressPool:
    """Two layers, two heads, 8 dense tokens of room, 16 token slots."""
    return KVPressPool.sized(8)(
        16,
        page_size=1,
        dtype=torch.float32,
        head_num=2,
        head_dim=16,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )


@pytest.mark.parametrize("name", sorted(public_methods(MHATokenToKVPool)))
def test_no_method_of_the_pool_takes_slots_for_rows(name: str, pool: KVPressPool) -> None:
    """Each of SGLang's methods is known to mean the same here, or raises. A new one of a new SGLang fails this."""
    if name in POOL_METHODS_THAT_HOLD:
        return
    parameters = list(inspect.signature(getattr(pool, name)).parameters.values())
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    named = {p.name: True for p in parameters if p.default is p.empty and p.kind is p.KEYWORD_ONLY}
    before = pool.cells.k.clone(), pool.cells.v.clone(), pool.cells.table.clone()
    expected = RuntimeError if name in POOL_METHODS_OF_QUANTISED_CACHES else NotImplementedError
    with pytest.raises(expected):
        getattr(pool, name)(*[torch.ones(1, 1, dtype=torch.int64)] * len(required), **named)
    after = pool.cells.k, pool.cells.v, pool.cells.table
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["resize", "translate_kv_indices_for_transfer", "get_cpu_copy", "load_cpu_copy"])
def test_the_allocator_hands_no_rows_out(name: str, pool: KVPressPool) -> None:
    allocator = KVPressAllocator(16, torch.float32, "cpu", pool, False)
    arguments = [torch.ones(1, dtype=torch.int64)] * (2 if name == "load_cpu_copy" else 1)
    with pytest.raises(NotImplementedError, match="kv press"):
        getattr(allocator, name)(*arguments)
    assert allocator.size == allocator.available_size() == 16


def target_of(hook: Hook) -> Callable[..., Any]:
    """The function that a hook replaces, as its class holds it."""
    module, owner, name = hook.target.rsplit(".", 2)
    found = inspect.getattr_static(getattr(__import__(module, fromlist=[owner]), owner), name)
    return inspect.unwrap(getattr(found, "__func__", found))


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: ".".join(hook.target.rsplit(".", 2)[1:]))
def test_hooks_accept_what_their_targets_accept(hook: Hook) -> None:
    """On the pinned wheel: every target is there, and its arguments fit the hook (which gets one more in front)."""
    assert hook.kind in (HookType.AROUND, HookType.AFTER)
    for given, named in calls(target_of(hook)):
        inspect.signature(hook.function).bind("original or result", *given, **named)


@pytest.mark.parametrize("module", ["llama", "mistral", "qwen2", "qwen3"])
def test_no_model_writes_keys_and_values_past_us(module: str) -> None:
    """SGLang's fused rotation and write takes a token slot for a row; no model that is served uses it."""
    source = importlib.util.find_spec(f"sglang.srt.models.{module}")
    assert source is not None and source.origin is not None
    text = Path(source.origin).read_text()
    assert "fused_set_kv_buffer" not in text and "get_fused_kv_write_buffers" not in text
