"""Below what score a step's tokens are condemned."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvzap_sglang.step_plan import RowPlan, StepPlan


def score_limits(plan: StepPlan, sinks: int) -> npt.NDArray[np.float32] | float:
    """One number, or fp32 `[tokens]` where rows or positions differ; -inf keeps. sinks: positions that are always kept."""
    limits = {_limit(row, sinks) for row in plan.rows} or {-math.inf}
    if len(limits) == 1 and (limit := limits.pop()) is not None:
        return limit
    return np.concatenate([_limits(row, sinks) for row in plan.rows])


def _limit(row: RowPlan, sinks: int) -> float | None:
    """Of all the row's tokens, or None where they differ."""
    if row.start >= row.prune_end or row.end <= sinks:
        return -math.inf
    return row.threshold if sinks <= row.start and row.end <= row.prune_end else None


def _limits(row: RowPlan, sinks: int) -> npt.NDArray[np.float32]:
    positions = np.arange(row.start, row.end)
    pruned = (sinks <= positions) & (positions < row.prune_end)
    return np.where(pruned, row.threshold, -math.inf).astype(np.float32)
