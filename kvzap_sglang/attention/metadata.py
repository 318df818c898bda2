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


def decode_lists(plan: StepPlan, req_to_token: torch.Tensor, window: int) -> PrefixLists:
    """Every row's `[0, end)`; the query at `end - 1` sees positions of age <= window densely."""
    bounds = [(row.row, row.end, row.end - 1 - window) for row in plan.rows]
    return _lists(req_to_token, bounds)


def extend_pieces(plan: StepPlan, req_to_token: torch.Tensor, window: int) -> list[ExtendPiece]:
    """Each row's chunk, cut where prompt tokens of a dense prefill end."""
    pieces, offset = [], 0
    for row in plan.rows:
        cut = min(max(row.dense_end, row.start), row.end)
        for start, end, dense in ((row.start, cut, True), (cut, row.end, False)):
            if start < end:
                from_ = dense_from(row, start, dense, window)
                prefix = _lists(req_to_token, [(row.row, start, from_)])
                pieces.append(ExtendPiece(start, end, offset + start - row.start, dense, prefix))
        offset += row.end - row.start
    return pieces


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
