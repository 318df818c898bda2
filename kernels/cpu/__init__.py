"""CPU kernels: attention of a per-head pruned KV cache (C++ for decode, torch's flash for extend); bf16 layers."""

from __future__ import annotations

from .elementwise import rms_norm, rotate
from .extend import extend_dense, extend_sparse
from .linear import linear
from .native import describe, ragged_decode, read_rows, visible_cells, write_cells

__all__ = [
    "describe",
    "extend_dense",
    "extend_sparse",
    "linear",
    "ragged_decode",
    "read_rows",
    "rms_norm",
    "rotate",
    "visible_cells",
    "write_cells",
]
