"""`--kv-press-attention`: which backend attends, which cell pool it needs, and what a step does with that pool."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from kvzap_sglang.config import KVPressConfig
from kvzap_sglang.memory.cell_pool import CellPool
from kvzap_sglang.runtime import Step

FLAG = "--kv-press-attention"


class AttentionParts(NamedTuple):
    """What belongs together. cell_pool, backend: classes. step: makes the step of a model runner."""

    cell_pool: type[CellPool]
    backend: type[AttentionBackend]
    step: Callable[[KVPressConfig, Any], Step]


def attention_name(config: KVPressConfig, device: str) -> str:
    """The backend's name, with `auto` resolved."""
    if config.kv_press_attention != "auto":
        return config.kv_press_attention
    if device != "cuda":
        return "cpu" if device == "cpu" else "triton"
    from kvzap_sglang.attention.flashinfer import flashinfer_fault

    return "triton" if flashinfer_fault() else "flashinfer"


def attention_parts(config: KVPressConfig, device: str) -> AttentionParts:
    """Imports what one of the backends needs, and nothing of the others."""
    name = attention_name(config, device)
    if name == "cpu":
        from kvzap_sglang.attention.cpu import KVPressCPUBackend

        return AttentionParts(CellPool, KVPressCPUBackend, _host_step)
    from kvzap_sglang.memory.device_cell_pool import DeviceCellPool

    if name == "flashinfer":
        from kvzap_sglang.attention.flashinfer import KVPressFlashInferBackend

        return AttentionParts(DeviceCellPool, KVPressFlashInferBackend, _device_step)
    from kvzap_sglang.attention.triton import KVPressTritonBackend

    return AttentionParts(DeviceCellPool, KVPressTritonBackend, _device_step)


def attention_faults(config: KVPressConfig, device: str, dtype: torch.dtype) -> Iterator[str]:
    """Why a backend cannot attend on this device in the model's dtype; each names the flag and the remedy."""
    chosen = config.kv_press_attention
    name = ("cpu" if device == "cpu" else "triton") if chosen == "auto" else chosen  # whatever else, it needs Triton
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device not in ("cpu", "cuda"):
        yield f"--device {device} cannot be combined with --kv-press: use --device cuda or --device cpu"
    elif name == "cpu" and device != "cpu":
        yield f"{FLAG} cpu attends on a CPU, the model is on {device}: give {FLAG} auto"
    elif name == "cpu" and dtype not in (torch.float32, torch.bfloat16):
        yield (
            f"--kv-press attends in float32 and bfloat16 on a CPU, the model would be served in {dtype}: "
            "give --dtype bfloat16 or --dtype float32"
        )
    elif name == "triton" and device == "cpu" and not interpreted:
        yield f"{FLAG} triton needs a GPU (or, to test it, Triton's interpreter: TRITON_INTERPRET=1): give {FLAG} auto"
    elif name == "triton" and interpreted and dtype == torch.bfloat16:
        yield f"Triton's interpreter (TRITON_INTERPRET=1) computes bfloat16 wrongly: give --dtype float32, or {FLAG} auto"
    elif name == "flashinfer":
        yield from _flashinfer_faults(device, dtype)


def _flashinfer_faults(device: str, dtype: torch.dtype) -> Iterator[str]:
    """Why FlashInfer cannot do what the user asks of it."""
    from kvzap_sglang.attention.flashinfer import DTYPES, flashinfer_fault

    if device != "cuda":
        yield f"{FLAG} flashinfer needs a GPU: give {FLAG} auto"
    elif fault := flashinfer_fault(imports=False):
        yield f"{FLAG} flashinfer: {fault}"
    elif dtype not in DTYPES:
        yield (
            f"{FLAG} flashinfer attends in float16 and bfloat16, the model would be served in {dtype}: "
            f"give --dtype bfloat16, or {FLAG} triton"
        )


def _host_step(config: KVPressConfig, runner: Any) -> Step:
    from kvzap_sglang.host_step import HostStep

    return HostStep(runner.kv_press, runner.token_to_kv_pool_allocator.cells, config.sinks)


def _device_step(config: KVPressConfig, runner: Any) -> Step:
    """With buffers for the largest batch and the largest chunk."""
    from sglang.srt.runtime_context import max_prefill_buffer_tokens

    from kvzap_sglang.device_step import DeviceStep
    from kvzap_sglang.presses.kvzap import KVzapPress

    tokens = max(runner.req_to_token_pool.size, max_prefill_buffer_tokens())
    dtype = runner.model_config.dtype if isinstance(runner.kv_press, KVzapPress) else torch.float32
    return DeviceStep(runner.kv_press, runner.token_to_kv_pool_allocator.cells, config.sinks, tokens, dtype)
