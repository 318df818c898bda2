"""How one int32 of the cell table names a cell, and the ragged list of visible cells every kernel takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

NONE = -1
"""Entry of a (layer, token slot, KV head) without a cell: never written, or pruned."""

CONDEMNED = 1 << 30
"""Bit of an entry whose cell scored below the threshold and is still in memory."""

CELL_MASK = CONDEMNED - 1
"""`entry & CELL_MASK` is the cell of an entry that is not `NONE`."""


class VisibleCells(NamedTuple):
    """Cells visible to one query of each of B requests, for every KV head of one layer.

    Segment `s = b * H + h` is `cells[indptr[s]:indptr[s + 1]]`, in position order.

    indptr: int64 `[B * H + 1]`.
    cells: int32 `[nnz]`, rows of the K and V pools.
    positions: int32 `[nnz]`, the key's position in its request; None unless asked for.
    condemned: uint8 `[nnz]`, 1 where the cell is visible only because it is in the window; None unless asked for.
    """

    indptr: torch.Tensor
    cells: torch.Tensor
    positions: torch.Tensor | None = None
    condemned: torch.Tensor | None = None
