"""From a step plan to the inputs of visible-list building: which slots, from which position densely."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch

from kvzap_sglang.step_plan import RowPlan, StepPlan


class PrefixLists(NamedTuple):
    """Positions `[0, length)` of one row or of several rows, ready for `visible_cells`.

    slots: int64 `[sum of lengths]`. slot_indptr: int64 `[rows + 1]`.
    dense_from: int64 `[rows]`, positions from which condemned cells are visible too.
    """

    slots: torch.Tensor
    slot_indptr: torch.Tensor
    dense_from: torch.Tensor


class ExtendPiece(NamedTuple):
    """Consecutive query positions of one row that follow one rule.

    start, end: positions. offset: index of `start` among the step's tokens.
    dense: whether the queries see each other densely. prefix: what they see below `start`.
    """

    start: int
    end: int
    offset: int
    dense: bool
    prefix: PrefixLists


class SingleTokens(NamedTuple):
    """Queries that are alone in their piece, of any number of rows: decode steps and exact prefix hits.

    tokens: int64 `[n]`, indices among the step's tokens. lists: what each sees, itself included.
    """

    tokens: torch.Tensor
    lists: PrefixLists


class AttentionPlan(NamedTuple):
    """A step's attention: the single queries, None if there are none, and the longer pieces."""

    singles: SingleTokens | None
    pieces: list[ExtendPiece]


class Piece(NamedTuple):
    """Consecutive query positions `[start, end)` of one row that follow one rule.

    row: of `req_to_token`. token: index of `start` among the step's tokens. dense: whether the queries see each other
    densely. dense_from: first position below `start` whose condemned cells they may see.
    """

    row: int
    start: int
    end: int
    token: int
    dense: bool
    dense_from: int


def pieces_of(plan: StepPlan, window: int) -> Iterator[Piece]:
    """Each row's chunk, cut where prompt tokens of a dense prefill end."""
    offset = 0
    for row in plan.rows:
        cut = min(max(row.dense_end, row.start), row.end)
        for start, end, dense in ((row.start, cut, True), (cut, row.end, False)):
            if start < end:
                token = offset + start - row.start
                yield Piece(row.row, start, end, token, dense, max(dense_from(row, start, dense, window), 0))
        offset += row.end - row.start


def attention_plan(plan: StepPlan, req_to_token: torch.Tensor, window: int) -> AttentionPlan:
    """The inputs of the CPU kernels."""
    pieces: list[ExtendPiece] = []
    tokens: list[int] = []
    bounds: list[tuple[int, int, int]] = []
    for piece in pieces_of(plan, window):
        if piece.end == piece.start + 1:
            tokens.append(piece.token)
            bounds.append((piece.row, piece.end, piece.dense_from))
        else:
            prefix = _lists(req_to_token, [(piece.row, piece.start, piece.dense_from)])
            pieces.append(ExtendPiece(piece.start, piece.end, piece.token, piece.dense, prefix))
    if not tokens:
        return AttentionPlan(None, pieces)
    index = torch.tensor(tokens, dtype=torch.int64, device=req_to_token.device)
    return AttentionPlan(SingleTokens(index, _lists(req_to_token, bounds)), pieces)


def dense_from(row: RowPlan, start: int, dense: bool, window: int) -> int:
    """First position below `start` whose condemned cells a query at or beyond `start` may see.

    Dense: the window as it stood at the hit, for all of the prompt. Otherwise the oldest age any
    query of the piece can reach; the kernel masks the rest by age.
    """
    return row.hit - window if dense else start - window


def _lists(req_to_token: torch.Tensor, bounds: list[tuple[int, int, int]]) -> PrefixLists:
    slots = [req_to_token[row, :length] for row, length, _ in bounds]
    indptr = [0, *accumulate(length for _, length, _ in bounds)]
    device = req_to_token.device
    return PrefixLists(
        torch.cat(slots).to(torch.int64),
        torch.tensor(indptr, dtype=torch.int64, device=device),
        torch.tensor([from_ for _, _, from_ in bounds], dtype=torch.int64, device=device),
    )
