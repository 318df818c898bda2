"""Fail closed: every refusal speaks, every missing piece is found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvzap_sglang import guard
from kvzap_sglang.attention import flashinfer
from kvzap_sglang.attention.choice import attention_faults, attention_name, attention_parts
from kvzap_sglang.config import KVPressConfigError, build_config
from kvzap_sglang.hooks import arguments
from kvzap_sglang.plugin import HOOKS

SWITCHED_ON: dict[str, Any] = {
    "speculative_algorithm": "EAGLE", "dllm_algorithm": "x", "disaggregation_mode": "prefill", "page_size": 16,
    "pp_size": 2, "tp_size": 2, "dcp_size": 2, "attn_cp_size": 2, "kv_cache_dtype": "fp8_e5m2",
    "tokenizer_worker_num": 2, "lora_paths": ["a"], "elastic_ep_backend": "mooncake", "kv_canary": "on",
    "cpu_offload_gb": 4, "cuda_graph_backend_prefill": "full", "cuda_graph_backend_decode": "breakable",
}  # fmt: skip


@pytest.fixture(scope="module")
def defaults() -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(model_path="none")


def field_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


@pytest.mark.parametrize("refusal", guard.REFUSALS, ids=lambda r: r.flag)
def test_each_refusal_fires_alone(refusal: guard.Refusal, defaults: Any) -> None:
    name = field_of(refusal.flag)
    assert hasattr(defaults, name), "SGLang has no such argument"
    settings = {field_of(r.flag): getattr(defaults, field_of(r.flag)) for r in guard.REFUSALS}
    assert list(guard.refused(SimpleNamespace(**settings))) == []
    settings[name] = SWITCHED_ON.get(name, True)
    (line,) = guard.refused(SimpleNamespace(**settings))
    assert refusal.flag in line and refusal.why in line and refusal.remedy in line


def test_environment_switches_are_refused(defaults: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    (line,) = guard.refused(defaults)
    assert "SGLANG_RUST_SERVER" in line


@pytest.mark.parametrize("field", ["attention_backend", "decode_attention_backend", "radix_cache_backend"])
def test_chosen_backends_are_refused(field: str) -> None:
    chosen = dict.fromkeys(
        ("attention_backend", "prefill_attention_backend", "decode_attention_backend", "radix_cache_backend")
    )
    guard.refuse_chosen_backends(SimpleNamespace(**chosen))
    with pytest.raises(KVPressConfigError, match="--" + field.replace("_", "-")):
        guard.refuse_chosen_backends(SimpleNamespace(**{**chosen, field: "triton"}))


@pytest.mark.parametrize(
    ("attention", "device", "dtype", "interpreted", "said"),
    [
        ("auto", "cpu", torch.float32, False, None),
        ("auto", "cpu", torch.bfloat16, False, None),
        ("auto", "cpu", torch.float16, False, "--dtype bfloat16"),
        ("auto", "cuda", torch.bfloat16, False, None),
        ("auto", "cuda", torch.float16, False, None),
        ("auto", "xpu", torch.bfloat16, False, "--device xpu"),
        ("cpu", "cuda", torch.bfloat16, False, "--kv-press-attention cpu"),
        ("triton", "cuda", torch.bfloat16, False, None),
        ("triton", "cpu", torch.float32, False, "TRITON_INTERPRET=1"),
        ("triton", "cpu", torch.float32, True, None),
        ("triton", "cpu", torch.bfloat16, True, "--dtype float32"),
    ],
)
def test_attention_that_cannot_be_is_refused(
    attention: str,
    device: str,
    dtype: torch.dtype,
    interpreted: bool,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    config = build_config({"kv_press": "streaming", "kv_press_attention": attention})
    assert config is not None
    faults = list(attention_faults(config, device, dtype))
    assert (len(faults) == 0) if said is None else (said in faults[0])


@pytest.mark.parametrize(
    ("device", "dtype", "fault", "said"),
    [
        ("cuda", torch.bfloat16, None, None),
        ("cuda", torch.float16, None, None),
        ("cuda", torch.float32, None, "--dtype bfloat16"),
        ("cuda", torch.bfloat16, "not installed", "--kv-press-attention flashinfer: not installed"),
        ("cpu", torch.bfloat16, None, "needs a GPU: give --kv-press-attention auto"),
        ("xpu", torch.bfloat16, None, "--device xpu"),
    ],
)
def test_flashinfer_is_refused_where_it_cannot_attend(
    device: str, dtype: torch.dtype, fault: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer, "flashinfer_fault", lambda *, imports: None if imports else fault)
    config = build_config({"kv_press": "streaming", "kv_press_attention": "flashinfer"})
    assert config is not None
    faults = list(attention_faults(config, device, dtype))
    assert faults == [] if said is None else len(faults) == 1 and said in faults[0]


def test_what_attends_unless_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build_config({"kv_press": "streaming"})
    assert config is not None
    for fault, name in ((None, "flashinfer"), ("not installed", "triton")):
        monkeypatch.setattr(flashinfer, "flashinfer_fault", lambda fault=fault: fault)
        assert attention_name(config, "cuda") == name and attention_name(config, "cpu") == "cpu"
        assert attention_parts(config, "cuda").backend.__name__.lower() == f"kvpress{name}backend"
        assert list(attention_faults(config, "cuda", torch.float32)) == []


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert guard.version_fault() is None
    monkeypatch.setattr(guard.metadata, "version", lambda name: "0.5.24")
    assert "0.5.23" in (guard.version_fault() or "")


@pytest.mark.parametrize(
    "hook", HOOKS, ids=lambda hook: hook.target.rsplit(".", 2)[1] + "." + hook.target.rsplit(".", 1)[1]
)
def test_every_hook_target_exists(hook: Any) -> None:
    module, owner, name = hook.target.rsplit(".", 2)
    target = getattr(getattr(__import__(module, fromlist=[owner]), owner), name)
    assert callable(target)


def self_check_inputs(**replaced: Any) -> tuple[Any, Any, Any]:
    from kvzap_sglang.attention.cpu import KVPressCPUBackend
    from kvzap_sglang.memory.allocator import KVPressAllocator
    from kvzap_sglang.memory.cell_pool import CellPool
    from kvzap_sglang.memory.kv_pool import KVPressPool
    from kvzap_sglang.radix_cache import KVPressRadixCache

    kv_pool = KVPressPool.__new__(KVPressPool)
    kv_pool.cells = CellPool.__new__(CellPool)
    parts = {
        "device": "cpu",
        "token_to_kv_pool": kv_pool,
        "token_to_kv_pool_allocator": KVPressAllocator.__new__(KVPressAllocator),
        "attn_backend": KVPressCPUBackend.__new__(KVPressCPUBackend),
        "kv_press_layers": 4,
        "model_config": SimpleNamespace(num_hidden_layers=4),
        "tree": KVPressRadixCache.__new__(KVPressRadixCache),
    } | replaced
    return build_config({"kv_press": "streaming"}), SimpleNamespace(**parts), parts["tree"]


def test_self_check_passes_when_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "missing_hooks", lambda: [])
    guard.self_check(*self_check_inputs())


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        ({"token_to_kv_pool": object()}, "KV pool is object"),
        ({"token_to_kv_pool": SimpleNamespace(cells=object())}, "cell pool is object"),
        ({"token_to_kv_pool_allocator": object()}, "allocator is object"),
        ({"attn_backend": object()}, "attention backend is object"),
        ({"tree": object()}, "radix cache is object"),
        ({"kv_press_layers": 3}, "3 layers wrapped of 4"),
    ],
)
def test_self_check_names_what_is_missing(replaced: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "missing_hooks", lambda: [])
    with pytest.raises(guard.GuardError, match=said):
        guard.self_check(*self_check_inputs(**replaced))


def test_self_check_names_a_hook_that_was_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_patched", {hook.target for hook in HOOKS[1:]})
    with pytest.raises(guard.GuardError, match=HOOKS[0].target):
        guard.self_check(*self_check_inputs())


def test_a_failing_registration_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvzap_sglang import plugin

    def broken() -> None:
        raise RuntimeError("renamed upstream")

    monkeypatch.setattr(plugin, "_register", broken)
    with pytest.raises(SystemExit, match="renamed upstream"):
        plugin.register()


def test_hooks_leave_a_server_without_a_press_alone() -> None:
    runner = SimpleNamespace(server_args=SimpleNamespace())
    assert arguments.config_of(runner.server_args) is None
