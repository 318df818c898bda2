"""Triton kernels of a per-head pruned KV cache: lists of visible cells, decode and extend attention, writing new cells.

Every launch has a shape that the host knows beforehand, reads nothing back, and writes into buffers it is given, so that
a decode step can be recorded as a CUDA graph. `reference` has the same functions in plain torch.
"""

from __future__ import annotations

from .decode import chunked_decode
from .extend import extend
from .visible import VisibleChunks, first_chunks, visible_chunks
from .write import write_cells

__all__ = ["VisibleChunks", "chunked_decode", "extend", "first_chunks", "visible_chunks", "write_cells"]
