"""Below what score tokens are condemned: thresholds, sinks and generated tokens in one step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvzap_sglang.score_limits import score_limits
from kvzap_sglang.sharing.reused_tokens import NO_REUSE
from kvzap_sglang.step_plan import RowPlan, StepPlan

INF = math.inf


def row(start: int, end: int, threshold: float = -3.0, prune_end: int = 1000) -> RowPlan:
    state: Any = None
    return RowPlan(0, start, end, 0, prune_end, 0, threshold, NO_REUSE, state)


def limits(rows: list[RowPlan], sinks: int) -> list[float] | float:
    plan = StepPlan(1, is_decode=False, rows=rows)
    found = score_limits(plan, sinks)
    return found.tolist() if isinstance(found, np.ndarray) else found


@pytest.mark.parametrize(
    ("rows", "sinks", "expected"),
    [
        ([], 0, -INF),
        ([row(0, 3)], 0, -3.0),
        ([row(5, 6), row(9, 12)], 4, -3.0),
        ([row(5, 6), row(5, 6, -4.0)], 0, [-3.0, -4.0]),
        ([row(2, 6)], 4, [-INF, -INF, -3.0, -3.0]),
        ([row(0, 4)], 4, -INF),
        ([row(8, 9, prune_end=8)], 0, -INF),
        ([row(7, 8, prune_end=8)], 0, -3.0),
        ([row(6, 10, prune_end=8)], 0, [-3.0, -3.0, -INF, -INF]),
        ([row(1, 10, prune_end=3)], 2, [-INF, -3.0, *[-INF] * 7]),
        ([row(9, 10, prune_end=8), row(0, 2, prune_end=8)], 0, [-INF, -3.0, -3.0]),
        ([row(9, 10, 0.5, prune_end=8), row(9, 10, prune_end=9)], 0, -INF),
    ],
)
def test_limits(rows: list[RowPlan], sinks: int, expected: list[float] | float) -> None:
    assert limits(rows, sinks) == expected
