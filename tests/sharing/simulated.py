"""Simulated servers whose every cell can be counted by hand."""

from __future__ import annotations

import random

from tests.memory.simulator import Request, Simulator


def make(
    *,
    window: int = 4,
    sparse: bool = False,
    recompute: bool = True,
    physical: int = 200,
    lag: int = 0,
    removed: float = 1.0,
) -> Simulator:
    """A server that condemns everything, so that what is in memory is what windows hold. Results come at once."""
    return Simulator(
        physical=physical,
        headroom=3,
        window=window,
        lag=lag,
        removed=removed,
        sparse=sparse,
        recompute=recompute,
        seed=0,
        tokens=random.Random(0),
    )


def start(simulator: Simulator, prompt: list[int], max_new: int = 50, chunk: int = 64) -> Request:
    """Admit a request and compute its prompt."""
    request = Request(len(simulator.running), prompt, max_new)
    assert simulator.admit(request)
    while simulator.chunked is not None:
        assert simulator.prefill_chunk(chunk)
    assert simulator.check() == []
    return request
