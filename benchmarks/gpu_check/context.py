"""What a part of the run is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_check.kernels import Kernels

Record = dict[str, Any]
MARGIN = 1 << 30
"""Bytes that stay free on the device."""


@dataclass(frozen=True)
class Context:
    """device: "cuda" or "cpu". tiny: tiny shapes. deadline: of `time.perf_counter`; what begins later is skipped."""

    kernels: Kernels
    device: str
    tiny: bool
    seed: int
    deadline: float

    @property
    def dtype(self) -> torch.dtype:
        """Of what is timed. Triton's interpreter computes bf16 as integers."""
        return torch.bfloat16 if self.device == "cuda" else torch.float16

    def why_not(self, size: int) -> str | None:
        """Why something that needs `size` bytes cannot be run now, None if it can."""
        if time.perf_counter() > self.deadline:
            return "the time budget is used up"
        if self.device == "cuda":
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
            if size + MARGIN > free:
                return f"needs {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        return None


def attempt(record: Record, measure: Callable[[], Record]) -> Record:
    """The record with what `measure` found, or with the error that it raised."""
    try:
        return record | measure()
    except Exception as problem:
        return record | {"error": f"{type(problem).__name__}: {problem}"[:500]}


def attempt_all(record: Record, measure: Callable[[], Iterator[Record]]) -> Iterator[Record]:
    """The records of `measure`; an error ends them with a record of its own."""
    try:
        yield from measure()
    except Exception as problem:
        yield record | {"error": f"{type(problem).__name__}: {problem}"[:500]}
