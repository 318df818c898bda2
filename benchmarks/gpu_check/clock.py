"""Seconds of GPU work: CUDA events around replays of a graph, so that the price of launching from Python is not in them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

WARM_UP, AT_LEAST, AT_MOST, AIM_SECONDS = 2, 5, 30, 0.05
"""Replays not counted; replays counted: as many as take about `AIM_SECONDS`, within bounds."""


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run` recorded as a graph, after it ran twice (everything compiled, every buffer there)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph, before: Callable[[], object] | None = None) -> list[float]:
    """Of single replays. before: what has to be done ahead of each, outside of the time."""

    def once() -> float:
        if before is not None:
            before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    rough = [once() for _ in range(WARM_UP)][-1]
    return [once() for _ in range(max(AT_LEAST, min(AT_MOST, int(AIM_SECONDS / max(rough, 1e-9)))))]


def seconds_per_call(calls: Sequence[Callable[[], object]], device: str) -> float:
    """Median seconds of one of `calls`, each of which works on other data; together more than a cache holds.

    On a CPU, where this runs only to see that it runs: of one pass without a warm-up.
    """

    def run() -> None:
        for call in calls:
            call()

    if device != "cuda":
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) / len(calls)
    return statistics.median(replay_seconds(capture(run))) / len(calls)


def copy_bytes_per_second(device: str) -> float:
    """Of a large copy on the device, bytes read and bytes written together: the ceiling of whatever moves bytes."""
    size = 1 << 20
    if device == "cuda":
        size = min(4 << 30, torch.cuda.mem_get_info()[0] // 4)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_per_call([lambda: target.copy_(source)], device)
