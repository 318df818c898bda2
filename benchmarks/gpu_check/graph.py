"""A decode step of all layers as a CUDA graph: is a replay what running it gives, how long is it, what is in it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu_check.clock import capture, replay_seconds, seconds_per_call
from benchmarks.gpu_check.comparing import TOLERANCE, Case, Wrong, equal, error
from benchmarks.gpu_check.context import Context, Record, attempt
from benchmarks.gpu_check.kernels import Kernels, torch_forms
from benchmarks.gpu_check.shapes import CHUNKS, QWEN3_8B, TINY, Model
from benchmarks.gpu_check.spread import kept_fractions
from benchmarks.gpu_check.step import DecodeStep, Snapshot, build_step, step_bytes
from kvzap_sglang.kernels.counters import FAULT, faults

CASES = ((8, 8192, 0.33), (32, 8192, 0.33), (32, 8192, 1.0), (1, 32768, 0.33))
"""(batch, context, kept) of Qwen3-8B, the most important first."""


def step_cases(kernels: Kernels, dtype: torch.dtype, device: str, tiny: bool) -> Iterator[Case]:
    """A whole step of ragged requests by the kernels and in plain torch, from the same state."""
    lengths = [1, 2, 129, 130, 131, 200] if tiny else [1, 2, 128, 129, 130, 131, 1024, 1025, 2500]

    def run(rng: torch.Generator) -> float:
        seed = int(torch.randint(1 << 30, (), generator=rng))
        kept = kept_fractions(0.4, TINY.layers, TINY.kv_heads, seed)
        step = build_step(TINY, lengths, kept, dtype, 64 if tiny else 512, device, seed)
        snapshot, results = Snapshot(step), []
        for forms in (kernels, torch_forms()):
            snapshot.restore()
            step.run(forms)
            results.append(step.results())
        return compare(results[0], results[1], TOLERANCE[dtype])

    yield Case("decode step", f"{TINY.layers} layers, lengths {lengths}", run)


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> float:
    """Integers equal; floating-point outputs within `tolerance`, or equal where it is 0; no fault, no NaN."""
    if int(found["counters"][FAULT]):
        raise Wrong(f"the counters flag {faults(int(found['counters'][FAULT]))}")
    if bool(found["out"].isnan().any()):
        raise Wrong("an output was not written, or of what nobody owns")
    worst = 0.0
    for name, tensor in expected.items():
        if tensor.is_floating_point() and tolerance:
            worst = max(worst, error(found[name], tensor, tolerance, name))
        else:
            equal(found[name], tensor, name)
    return worst


def graph_times(context: Context) -> Iterator[Record]:
    """Replays on a GPU. On a CPU the same step twice, and times that mean nothing."""
    model = TINY if context.tiny else QWEN3_8B
    for batch, positions, kept in ((2, 140, 0.33),) if context.tiny else CASES:
        record = {
            "kind": "step", "model": model.name, "layers": model.layers, "batch": batch, "context": positions,
            "kept": kept, "layout": "scattered",
        }  # fmt: skip
        reason = context.why_not(step_bytes(model, batch * positions, kept))
        if reason is not None:
            yield record | {"kind": "skipped", "what": "step", "reason": reason}
            continue
        yield attempt(record, lambda: _measure(context, model, batch, positions, kept))  # noqa: B023


def _measure(context: Context, model: Model, batch: int, positions: int, kept: float) -> Record:
    fractions = kept_fractions(kept, model.layers, model.kv_heads, context.seed)
    chunk = 64 if context.tiny else CHUNKS[0]
    step = build_step(model, [positions] * batch, fractions, context.dtype, chunk, context.device, context.seed)
    snapshot = Snapshot(step)
    if context.device != "cuda":
        return {"chunk": chunk, "replay_equals_eager": None} | _run_twice(context, step, snapshot)
    return {"chunk": chunk} | _replay(context, step, snapshot)


def _run_twice(context: Context, step: DecodeStep, snapshot: Snapshot) -> Record:
    """Without a GPU there is no graph: the step, run twice from the same state, gives the same."""
    results, began = [], time.perf_counter()
    for _ in range(2):
        snapshot.restore()
        step.run(context.kernels)
        results.append(step.results())
    compare(results[1], results[0], 0)
    seconds = (time.perf_counter() - began) / 2
    return {"two_runs_equal": True} | _times(context, step, lambda: seconds)


def _replay(context: Context, step: DecodeStep, snapshot: Snapshot) -> Record:
    """Also for lengths other than the recorded ones: a server records one graph per batch size."""
    kernels, recorded = context.kernels, step.lengths.clone()
    graph = capture(lambda: step.run(kernels))
    for lengths in (recorded, recorded // 2 + torch.arange(len(recorded), device=recorded.device)):
        step.go_to(lengths)
        results = []
        for run in (lambda: step.run(kernels), graph.replay):
            snapshot.restore()
            run()
            torch.cuda.synchronize()
            results.append(step.results())
        compare(results[1], results[0], 0)
    step.go_to(recorded)
    snapshot.restore()
    whole = statistics.median(replay_seconds(graph, snapshot.restore))
    profiled = attempt({}, lambda: _by_kernel(graph, snapshot))
    return {"replay_equals_eager": True, "profiler": profiled} | _times(context, step, lambda: whole)


def _times(context: Context, step: DecodeStep, whole: Callable[[], float]) -> Record:
    """Of the whole step, of its lists, and of attention (chunks and merge): what lists and attention take beyond the lists."""
    kernels, layers = context.kernels, range(len(step.q))

    def both() -> None:
        for layer in layers:
            step.list_visible(kernels, layer)
            step.attend(kernels, layer)

    def lists() -> None:
        for layer in layers:
            step.list_visible(kernels, layer)

    seconds, listing = whole(), seconds_per_call([lists], context.device)
    attention = seconds_per_call([both], context.device) - listing
    return {
        "seconds": seconds,
        "list_seconds": listing,
        "attention_seconds": attention,
        "share_not_attention": 1 - attention / seconds,
    }


def _by_kernel(graph: torch.cuda.CUDAGraph, snapshot: Snapshot) -> Record:
    """Launches and seconds of each kernel of one replay, from torch's profiler."""
    snapshot.restore()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    found = {}
    for event in profile.key_averages():
        seconds = getattr(event, "device_time_total", 0) / 1e6
        if seconds:
            found[event.key[:80]] = {"launches": event.count, "seconds": seconds}
    return {"kernels": found}
