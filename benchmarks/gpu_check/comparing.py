"""Checks as values: each is run on its own, what it finds is a record, and a failing one stops no other."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Absolute and relative, of outputs in that dtype against fp64."""


class Case(NamedTuple):
    """One check. run: returns the largest error over what is allowed (0: equal bit for bit), or raises."""

    kernel: str
    name: str
    run: Callable[[torch.Generator], float]


class Wrong(Exception):
    """A kernel's result is not what it should be."""


def error(found: torch.Tensor, exact: torch.Tensor, tolerance: float, what: str = "output") -> float:
    """Largest error over `tolerance * (1 + |exact|)`. Raises Wrong above 1; equal infinities and NaN are no error."""
    found, exact = found.double().cpu(), exact.double().cpu()
    if found.shape != exact.shape:
        raise Wrong(f"{what} has shape {tuple(found.shape)}, not {tuple(exact.shape)}")
    same = (found == exact) | (found.isnan() & exact.isnan())
    ratio = torch.where(same, 0.0, (found - exact).abs() / (tolerance * (1 + exact.abs())))
    ratio = torch.where(ratio.isnan(), torch.inf, ratio)
    worst = float(ratio.max()) if ratio.numel() else 0.0
    if worst > 1:
        at = [int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape)]
        raise Wrong(f"{what} at {at}: {float(found[tuple(at)]):g}, exact {float(exact[tuple(at)]):g}")
    return worst


def equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> float:
    """0 when equal (NaN equals NaN). Raises Wrong otherwise."""
    if torch.equal(found, expected):
        return 0.0
    return error(found, expected, 1e-30, what)


def run_cases(cases: Iterable[Case], dtype: torch.dtype, seed: int, device: str) -> Iterator[dict[str, Any]]:
    """A record per case, whatever happens in it."""
    for case in cases:
        began = time.perf_counter()
        record: dict[str, Any] = {
            "kind": "check", "kernel": case.kernel, "case": case.name, "dtype": str(dtype).removeprefix("torch."),
        }  # fmt: skip
        rng = torch.Generator().manual_seed(seed + zlib.crc32(f"{case.kernel} {case.name}".encode()))
        try:
            worst = case.run(rng)
            if device == "cuda":
                torch.cuda.synchronize()
            record |= {"status": "ok", "worst_error_of_allowed": worst}
        except Wrong as wrong:
            record |= {"status": "wrong", "message": str(wrong)}
        except Exception as problem:
            record |= _status_of(problem, dtype)
        yield record | {"seconds": time.perf_counter() - began}


def _status_of(problem: Exception, dtype: torch.dtype) -> dict[str, str]:
    """fp32 at large head dims can need more shared memory than there is: no model is served that way."""
    unsupported = dtype == torch.float32 and type(problem).__name__ == "OutOfResources"
    message = f"{type(problem).__name__}: {problem}"[:500]
    return {"status": "unsupported" if unsupported else "error", "message": message}
