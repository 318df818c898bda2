"""The kernels that are checked and timed, as one value, so that a test can put a broken one in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from kvzap_sglang.kernels import triton as _triton
from kvzap_sglang.kernels.triton import reference as _reference

Kernel = Callable[..., None]


@dataclass(frozen=True)
class Kernels:
    """The public functions of `kvzap_sglang.kernels.triton` that launch something of ours."""

    take_cells: Kernel
    free_cells: Kernel
    write_cells: Kernel
    place_chunks: Kernel
    visible_chunks: Kernel
    compact_lists: Kernel
    chunked_decode: Kernel
    extend: Kernel
    step_report: Kernel
    mlp_scores: Kernel


NAMES = tuple(field.name for field in fields(Kernels))


def ours() -> Kernels:
    """The Triton kernels."""
    return Kernels(**{name: getattr(_triton, name) for name in NAMES})


def torch_forms() -> Kernels:
    """The same in plain torch."""
    return Kernels(**{name: getattr(_reference, name) for name in NAMES})
