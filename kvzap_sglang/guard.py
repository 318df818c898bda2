"""Fail closed: what cannot be served is refused by name, what is half installed stops the server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, NamedTuple

from kvzap_sglang.config import KVPressConfig, KVPressConfigError, flag_name

SGLANG_VERSION = "0.5.23"


class GuardError(RuntimeError):
    """The press cannot run here, or is only half installed."""


class Refusal(NamedTuple):
    """A setting that cannot be combined with a press.

    flag: as the user typed it. given: the resolved setting -> whether it is on. why, remedy: half sentences.
    """

    flag: str
    given: Callable[[Any], bool]
    why: str
    remedy: str


def _is_set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name))


def _above(name: str, limit: int) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name) or 0) > limit


def _not_in(name: str, *allowed: Any) -> Callable[[Any], bool]:
    return lambda args: getattr(args, name) not in allowed


def _graphs(phase: str, backend: str) -> Callable[[Any], bool]:
    """Whether a phase's CUDA graphs are of this kind, by its own flag or in `--cuda-graph-config`."""

    def given(args: Any) -> bool:
        resolved = getattr(getattr(args, "cuda_graph_config", None), phase, None)
        return backend in (getattr(args, f"cuda_graph_backend_{phase}"), getattr(resolved, "backend", None))

    return given


_REMOVE = "remove the flag"

REFUSALS: tuple[Refusal, ...] = (
    Refusal("--speculative-algorithm", _is_set("speculative_algorithm"), "draft tokens are not scored", _REMOVE),
    Refusal("--dllm-algorithm", _is_set("dllm_algorithm"), "diffusion decoding rewrites tokens", _REMOVE),
    Refusal("--enable-hierarchical-cache", _is_set("enable_hierarchical_cache"), "pruned prefixes cannot be copied to the host", _REMOVE),
    Refusal("--enable-lmcache", _is_set("enable_lmcache"), "pruned prefixes cannot be exported", _REMOVE),
    Refusal("--enable-flexkv", _is_set("enable_flexkv"), "pruned prefixes cannot be exported", _REMOVE),
    Refusal("--enable-unified-cache-external-linker", _is_set("enable_unified_cache_external_linker"), "pruned prefixes cannot be exported", _REMOVE),
    Refusal("--disaggregation-mode", _not_in("disaggregation_mode", None, "null"), "pruned KV cannot be transferred between servers", _REMOVE),
    Refusal("--page-size", _above("page_size", 1), "a cell belongs to one token", "use --page-size 1"),
    Refusal("--pp-size", _above("pp_size", 1), "decisions do not cross pipeline stages", "use --tp-size instead"),
    Refusal("--enable-dp-attention", _is_set("enable_dp_attention"), "a rank may see only a shard of a layer's input", _REMOVE),
    Refusal("--enable-layernorm-sp", _is_set("enable_layernorm_sp"), "a rank may see only a shard of a layer's input", _REMOVE),
    Refusal("--enable-attn-tp-input-scattered", _is_set("enable_attn_tp_input_scattered"), "a rank may see only a shard of a layer's input", _REMOVE),
    Refusal("--dcp-size", _above("dcp_size", 1), "the cell table is not split over context ranks", _REMOVE),
    Refusal("--attn-cp-size", _above("attn_cp_size", 1), "the cell table is not split over context ranks", _REMOVE),
    Refusal("--enable-prefill-cp", _is_set("enable_prefill_cp"), "the cell table is not split over context ranks", _REMOVE),
    Refusal("--enable-kv-cache-sharding", _is_set("enable_kv_cache_sharding"), "the cell table is not sharded", _REMOVE),
    Refusal("--enable-unified-memory", _is_set("enable_unified_memory"), "the press has its own pool", _REMOVE),
    Refusal("--enable-page-major-kv-layout", _is_set("enable_page_major_kv_layout"), "the press has its own pool", _REMOVE),
    Refusal("--enable-hisparse", _is_set("enable_hisparse"), "the press has its own pool", _REMOVE),
    Refusal("--kv-cache-dtype", _not_in("kv_cache_dtype", "auto", "bf16", "bfloat16", "fp16", "float16"), "quantised cells are not supported yet", "use --kv-cache-dtype auto"),
    Refusal("--enable-torch-compile", _is_set("enable_torch_compile"), "compiled layers bypass the scorer", _REMOVE),
    Refusal("--cuda-graph-backend-decode", _graphs("decode", "breakable"), "attention outside the graph would be given fewer rows than were recorded", "leave the default or give full, not breakable"),
    Refusal("--cuda-graph-backend-prefill", _graphs("prefill", "full"), "a prefill recorded as one graph cannot tell which tokens see each other densely", "leave the default or give breakable, not full"),
    Refusal("--enable-pdmux", _is_set("enable_pdmux"), "prefill and decode would share the free stack without an order", _REMOVE),
    Refusal("--enable-two-batch-overlap", _is_set("enable_two_batch_overlap"), "two half batches would share one step plan", _REMOVE),
    Refusal("--enable-single-batch-overlap", _is_set("enable_single_batch_overlap"), "layers run out of the scorer's order", _REMOVE),
    Refusal("--enable-nvidia-megakernel", _is_set("enable_nvidia_megakernel"), "the fused model bypasses the scorer", _REMOVE),
    Refusal("--enable-amd-monokernel", _is_set("enable_amd_monokernel"), "the fused model bypasses the scorer", _REMOVE),
    Refusal("--enable-streaming-session", _is_set("enable_streaming_session"), "a session would keep rows outside the ledger", "send the whole conversation, or non-streaming sessions"),
    Refusal("--enable-session-radix-cache", _is_set("enable_session_radix_cache"), "it needs SGLang's own tree", _REMOVE),
    Refusal("--enable-memory-saver", _is_set("enable_memory_saver"), "released KV memory would take the cell table with it", _REMOVE),
    Refusal("--elastic-ep-backend", _is_set("elastic_ep_backend"), "ranks may come and go under the ledger", _REMOVE),
    Refusal("--enable-deterministic-inference", _is_set("enable_deterministic_inference"), "pruned attention has no batch-invariant kernel yet", _REMOVE),
    Refusal("--tokenizer-worker-num", _above("tokenizer_worker_num", 1), "extra tokenizer workers do not load plugins", "use --tokenizer-worker-num 1"),
    Refusal("--is-embedding", _is_set("is_embedding"), "embedding models keep no KV", _REMOVE),
    Refusal("--enable-lora", _is_set("enable_lora"), "adapters change the layer inputs that the surrogate was trained on", _REMOVE),
    Refusal("--lora-paths", _is_set("lora_paths"), "adapters change the layer inputs that the surrogate was trained on", _REMOVE),
    Refusal("--enable-multimodal", _is_set("enable_multimodal"), "image tokens are not scored", _REMOVE),
    Refusal("--kv-canary", _not_in("kv_canary", None, "", "none", "off"), "it reads token slots as memory", _REMOVE),
    Refusal("--prefill-only-disable-kv-cache", _is_set("prefill_only_disable_kv_cache"), "there is no KV to prune", _REMOVE),
    Refusal("--cpu-offload-gb", _above("cpu_offload_gb", 0), "offloaded layers bypass the scorer", _REMOVE),
    Refusal("--strip-thinking-cache", _is_set("strip_thinking_cache"), "answers would be released before they settle", _REMOVE),
)  # fmt: skip


def version_fault() -> str | None:
    """The pin: private seams are verified against exactly one SGLang."""
    found = metadata.version("sglang")
    if found == SGLANG_VERSION:
        return None
    return f"kvzap-sglang works with sglang=={SGLANG_VERSION}, found {found}: pip install sglang=={SGLANG_VERSION}"


def refused(args: Any) -> Iterator[str]:
    """One line for every refused setting of resolved server arguments."""
    for refusal in REFUSALS:
        if refusal.given(args):
            yield f"{refusal.flag} cannot be combined with --kv-press: {refusal.why}; {refusal.remedy}"
    for name in ("SGLANG_RUST_SERVER", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "SGLANG_USE_HND_KVCACHE"):
        if os.environ.get(name, "").lower() in ("1", "true", "yes"):
            yield f"{name}={os.environ[name]} cannot be combined with --kv-press: unset it"


def refuse_chosen_backends(server_args: Any) -> None:
    """The user may not choose what the press brings itself. Raises `KVPressConfigError`."""
    for name in (
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "radix_cache_backend",
    ):
        value = getattr(server_args, name)
        if value not in (None, "kvzap"):
            raise KVPressConfigError(
                f"{flag_name(name)} {value} cannot be combined with --kv-press, which brings its own: {_REMOVE}"
            )


def preflight(server_args: Any, config: KVPressConfig) -> None:
    """Everything that can be refused before a process is spawned. Raises `KVPressConfigError`."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.model_config import ModelConfig

    from kvzap_sglang.attention.choice import attention_faults

    faults = [fault for fault in (version_fault(),) if fault]
    args = resolving_view(server_args)
    faults += refused(args)
    if not faults:
        model = ModelConfig.from_server_args(server_args)
        faults += attention_faults(config, args.device, model.dtype)
        faults += _model_faults(model, config, args.tp_size)
    if faults:
        raise KVPressConfigError("\n".join(faults))


def _model_faults(model: Any, config: KVPressConfig, tp_size: int) -> Iterator[str]:
    from kvzap_sglang.attach import SUPPORTED_MODELS
    from kvzap_sglang.presses.surrogate import SurrogateError, check_fits, read_config

    architecture = (model.hf_config.architectures or ["unknown"])[0]
    if architecture not in SUPPORTED_MODELS:
        yield (
            f"--kv-press does not know the layers of {architecture}: serve one of "
            f"{', '.join(SUPPORTED_MODELS)}, or start without --kv-press"
        )
    elif getattr(model, "is_hybrid_swa", False):
        yield f"--kv-press does not support sliding-window layers ({architecture}): start without --kv-press"
    elif tp_size > model.get_total_num_kv_heads():
        yield (
            f"--tp-size {tp_size} would put {model.get_total_num_kv_heads()} KV heads on several ranks each, which "
            "would prune them apart: give --tp-size up to the number of KV heads"
        )
    elif config.kv_press == "kvzap":
        try:
            check_fits(
                read_config(config.surrogate),
                hidden_size=model.hidden_size,
                num_layers=model.num_hidden_layers,
                num_kv_heads=model.get_total_num_kv_heads(),
                source=config.surrogate,
            )
        except SurrogateError as error:
            yield str(error)


def missing_hooks() -> list[str]:
    """Hook targets that SGLang's registry did not patch (a renamed method is only logged there)."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvzap_sglang.plugin import HOOKS

    return [hook.target for hook in HOOKS if hook.target not in HookRegistry._patched]


def self_check(config: KVPressConfig, runner: Any, tree: Any) -> None:
    """Run in each scheduler once everything is built. Raises `GuardError` with every fault found."""
    from kvzap_sglang.attention.choice import attention_parts
    from kvzap_sglang.memory.allocator import KVPressAllocator
    from kvzap_sglang.memory.kv_pool import KVPressPool
    from kvzap_sglang.radix_cache import KVPressRadixCache

    parts = attention_parts(config, runner.device)
    faults = [f"hook not applied: {target}" for target in missing_hooks()]
    wanted = (
        ("KV pool", runner.token_to_kv_pool, KVPressPool),
        ("allocator", runner.token_to_kv_pool_allocator, KVPressAllocator),
        ("cell pool", getattr(runner.token_to_kv_pool, "cells", None), parts.cell_pool),
        ("attention backend", runner.attn_backend, parts.backend),
        ("radix cache", tree, KVPressRadixCache),
    )
    faults += [
        f"{what} is {type(found).__name__}, not {kind.__name__}"
        for what, found, kind in wanted
        if not isinstance(found, kind)
    ]
    layers = runner.model_config.num_hidden_layers
    if runner.kv_press_layers != layers:
        faults.append(f"{runner.kv_press_layers} layers wrapped of {layers}")
    if faults:
        raise GuardError(f"--kv-press {config.kv_press} is only half installed: " + "; ".join(faults))
