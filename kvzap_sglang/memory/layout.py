"""Sizes of a pruned KV cache on one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

INT32_BYTES = 4


@dataclass(frozen=True)
class CellLayout:
    """How token slots and cells relate.

    `physical_tokens` dense tokens fit in the cells; `virtual_tokens` token slots are handed out.
    """

    layers: int
    heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int
    physical_tokens: int
    virtual_tokens: int

    @property
    def cells_per_token(self) -> int:
        """Cells of one dense token: one per (layer, KV head)."""
        return self.layers * self.heads

    @property
    def cells_total(self) -> int:
        """Usable cells (the sink cell 0 is not counted)."""
        return self.physical_tokens * self.cells_per_token

    @property
    def bytes_per_cell(self) -> int:
        """K row and V row of one cell."""
        return (self.head_dim + self.v_head_dim) * self.itemsize

    @property
    def packed_bytes(self) -> int:
        """Bytes of one token's packed kept bits, one bit per (layer, head)."""
        return (self.cells_per_token + 7) // 8


def virtual_tokens(physical: int, headroom: float) -> int:
    """Token slots handed out over `physical` dense tokens of room."""
    return int(physical * headroom)


def physical_tokens(virtual: int, headroom: float) -> int:
    """Inverse of `virtual_tokens`: SGLang carries only the slot count from sizing to construction."""
    return math.ceil(virtual / headroom - 1e-6)


def side_bytes_per_cell(headroom: float) -> float:
    """Bytes beside K and V per cell: `headroom` cell-table entries and one free-stack entry."""
    return INT32_BYTES * (headroom + 1.0)
