"""Times of listing and decode attention as they are not launched: what would be faster.

The kernels' own constants are replaced while a variant is timed; nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from benchmarks.gpu_check.clock import seconds_per_call
from benchmarks.gpu_check.context import Context, Record, attempt
from benchmarks.gpu_check.layers import Lists, Pruned, build, bytes_needed
from benchmarks.gpu_check.shapes import CHUNKS, QWEN3_8B, TINY, DecodeShape, layer_of
from kvzap_sglang.kernels.triton import decode, visible

PROGRAMS = (264, 528, 2048, 4096)
CHUNK_KERNEL: tuple[dict[str, int], ...] = (
    {"KEYS": 32, "num_stages": 3},
    {"KEYS": 32, "num_stages": 5},
    {"KEYS": 64, "num_stages": 5},
    {"KEYS": 128, "num_stages": 3, "num_warps": 8},
)
"""Triton 3.7 uses one shared buffer for K and one for V up to 4 stages (the indices take the others), two with 5."""
VISIBLE_KERNEL: tuple[dict[str, int], ...] = ({"num_warps": 4}, {"num_warps": 8}, {"num_warps": 16})


class _Overridden:
    """A kernel whose launches have other constants or options."""

    def __init__(self, kernel: Any, options: dict[str, int]) -> None:
        self._kernel, self._options = kernel, options

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *arguments, **named: self._kernel[grid](*arguments, **(named | self._options))


def tuning_times(context: Context) -> Iterator[Record]:
    """At 33 % kept, scattered, of a layer of Qwen3-8B."""
    layer = layer_of(TINY if context.tiny else QWEN3_8B)
    for batch, positions in ((2, 96),) if context.tiny else ((8, 8192), (32, 8192), (1, 32768)):
        shape, layers = DecodeShape(layer, batch, positions), 2 if context.tiny else 8
        named = {"kind": "tuning", "models": layer.models, "batch": batch, "context": positions, "kept": 0.33}
        reason = context.why_not(bytes_needed(shape, layers))
        if reason is not None:
            yield named | {"kind": "skipped", "what": "tuning", "reason": reason}
            continue
        data = build(shape, layers, context.dtype, context.device, context.seed)
        chunk = 64 if context.tiny else CHUNKS[0]
        lists = Lists(data, Pruned(data, 0.33, "scattered", context.seed), chunk)
        for name, patches in _variants(context.tiny):
            yield attempt(named | {"chunk": chunk, "variant": name}, lambda: _time(context, lists, patches))  # noqa: B023


def _variants(tiny: bool) -> Iterator[tuple[str, list[tuple[Any, str, Any]]]]:
    """Name, and (module, attribute, replacement) of each."""
    yield "as it is", []
    for programs in PROGRAMS[:1] if tiny else PROGRAMS:
        yield f"{programs} programs", [(visible, "PROGRAMS", programs), (decode, "PROGRAMS", programs)]
    for options in () if tiny else CHUNK_KERNEL:
        yield f"attention {options}", [(decode, "_chunk_kernel", _Overridden(decode._chunk_kernel, options))]
    for options in VISIBLE_KERNEL[:1] if tiny else VISIBLE_KERNEL:
        yield f"lists {options}", [(visible, "_visible_kernel", _Overridden(visible._visible_kernel, options))]


def _time(context: Context, lists: Lists, patches: list[tuple[Any, str, Any]]) -> Record:
    active = [mock.patch.object(*patch) for patch in patches]
    for patch in active:
        patch.start()
    try:
        return {
            "list_seconds": seconds_per_call(lists.listing(context.kernels), context.device),
            "attention_seconds": seconds_per_call(lists.attending(context.kernels), context.device),
        }
    finally:
        for patch in active:
            patch.stop()
