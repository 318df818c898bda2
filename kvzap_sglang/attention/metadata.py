"""From a step plan to the inputs of visible-list building: which slots, from which position densely."""

from __future__ import annotations

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


def attention_plan(plan: StepPlan, req_to_token: torch.Tensor, window: int) -> AttentionPlan:
    """Each row's chunk, cut where prompt tokens of a dense prefill end."""
    pieces: list[ExtendPiece] = []
    tokens: list[int] = []
    bounds: list[tuple[int, int, int]] = []
    offset = 0
    for row in plan.rows:
        cut = min(max(row.dense_end, row.start), row.end)
        for start, end, dense in ((row.start, cut, True), (cut, row.end, False)):
            first_dense = dense_from(row, start, dense, window)
            token = offset + start - row.start
            if end == start + 1:
                tokens.append(token)
                bounds.append((row.row, end, first_dense))
            elif start < end:
                prefix = _lists(req_to_token, [(row.row, start, first_dense)])
                pieces.append(ExtendPiece(start, end, token, dense, prefix))
        offset += row.end - row.start
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
        torch.tensor([max(from_, 0) for _, _, from_ in bounds], dtype=torch.int64, device=device),
    )
