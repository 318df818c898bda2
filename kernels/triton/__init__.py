"""Triton kernels of a per-head pruned KV cache: cells taken, written and freed, lists of visible cells, attention over them.

Every launch has a shape that the host knows beforehand, reads nothing back, and writes into buffers it is given, so that
a decode step can be recorded as a CUDA graph. `reference` has the same functions in plain torch.
"""

from __future__ import annotations

from .cells import free_cells, take_cells
from .compact import compact_lists
from .decode import chunked_decode
from .extend import extend
from .report import step_report
from .score import mlp_scores
from .visible import VisibleChunks, first_chunks, place_chunks, visible_chunks
from .write import write_cells

__all__ = [
    "VisibleChunks",
    "chunked_decode",
    "compact_lists",
    "extend",
    "first_chunks",
    "free_cells",
    "mlp_scores",
    "place_chunks",
    "step_report",
    "take_cells",
    "visible_chunks",
    "write_cells",
]
