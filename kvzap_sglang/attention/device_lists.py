"""Inputs of the Triton kernels: which queries go together, and the buffers of their visible lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from kvzap_sglang.attention.metadata import Piece
from kvzap_sglang.kernels.triton import VisibleChunks
from kvzap_sglang.memory.layout import CellLayout
from kvzap_sglang.to_device import to_device

CHUNK = 512
"""Positions of one list."""


class QueryGroup(NamedTuple):
    """B pieces that one launch attends. Tensors are int64 `[B]`.

    rows, lengths, dense_from: of `visible_chunks`; a single query's own position is among its `lengths`.
    starts, begins, tokens: of `extend`. longest: most tokens of a piece. lists: filled anew for every layer.
    """

    rows: torch.Tensor
    lengths: torch.Tensor
    dense_from: torch.Tensor
    starts: torch.Tensor
    begins: torch.Tensor
    tokens: torch.Tensor
    longest: int
    lists: VisibleChunks


class StepGroups(NamedTuple):
    """A step's queries: those alone in their piece, then longer pieces by rule. None where there are none."""

    singles: QueryGroup | None
    dense: QueryGroup | None
    sparse: QueryGroup | None


def step_groups(pieces: Iterable[Piece], heads: int, device: torch.device) -> StepGroups:
    """Group a step's pieces. One copy to the device per group; its size, not its contents, is known to the launches."""
    found = list(pieces)
    longer = [piece for piece in found if piece.end > piece.start + 1]
    return StepGroups(
        _group([piece for piece in found if piece.end == piece.start + 1], heads, device, alone=True, positions=False),
        _group([piece for piece in longer if piece.dense], heads, device, alone=False, positions=False),
        _group([piece for piece in longer if not piece.dense], heads, device, alone=False, positions=True),
    )


def _group(pieces: list[Piece], heads: int, device: torch.device, *, alone: bool, positions: bool) -> QueryGroup | None:
    if not pieces:
        return None
    starts = np.array([piece.start for piece in pieces], np.int64)
    lengths = starts + 1 if alone else starts
    rows, begins, dense_from = (
        np.array([getattr(piece, name) for piece in pieces], np.int64) for name in ("row", "token", "dense_from")
    )
    tokens = np.array([piece.end - piece.start for piece in pieces], np.int64)
    first = np.concatenate([[0], np.cumsum(-(-lengths // CHUNK))])
    packed = to_device(np.stack([rows, lengths, dense_from, starts, begins, tokens]), device)
    lists = empty_lists(to_device(first.astype(np.int32), device), int(first[-1]), heads, positions=positions)
    a, b, c, d, e, f = packed.unbind(0)
    return QueryGroup(a, b, c, d, e, f, int(tokens.max()), lists)


def empty_lists(first: torch.Tensor, chunks: int, heads: int, *, positions: bool) -> VisibleChunks:
    """Lists of `chunks` chunks, contents undefined."""
    cells = torch.empty(chunks, heads, CHUNK, dtype=torch.int32, device=first.device)
    counts = torch.empty(chunks, heads, dtype=torch.int32, device=first.device)
    return VisibleChunks(first, cells, counts, torch.empty_like(cells) if positions else None)


def chunks_of(lengths: Iterable[int]) -> int:
    """Lists that requests of these lengths need."""
    return sum(-(-length // CHUNK) for length in lengths)


def graph_chunks(layout: CellLayout, batch: int, context: int) -> int:
    """Lists that a recorded decode step has room for.

    As many as the batch can need, or as all token slots fill: only requests that share more than that have more, and
    such a batch is not replayed (`KVPressTritonBackend.fits_graph`).
    """
    return min(batch * chunks_of([context]), layout.virtual_tokens // CHUNK + batch)
