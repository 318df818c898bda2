"""The ledger never promises a cell that the next launch will not find."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvzap_sglang.memory.ledger import CellLedger

TOTAL = 1000


def test_reports_replace_what_was_launched() -> None:
    ledger = CellLedger(TOTAL)
    ledger.launch(1, 100)
    ledger.launch(2, 50)
    assert ledger.available == 850
    ledger.report(1, 940)  # 40 settled in step 1
    assert ledger.available == 890
    ledger.report(2, 900)
    assert ledger.available == 900 and ledger.idle


def test_credits_count_at_once_and_only_once() -> None:
    ledger = CellLedger(TOTAL)
    ledger.launch(1, 100)
    ledger.credit(30)  # queued while step 1 runs
    assert ledger.available == 930
    ledger.launch(2, 10)  # drains the 30
    assert ledger.available == 920
    ledger.report(1, 900)
    assert ledger.available == 920
    ledger.report(2, 920)
    assert ledger.available == 920


@pytest.mark.parametrize("free", [-1, TOTAL + 1])
def test_impossible_reports_are_refused(free: int) -> None:
    with pytest.raises(RuntimeError, match="reports"):
        CellLedger(TOTAL).report(1, free)


def test_negative_credit_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        CellLedger(TOTAL).credit(-1)


@settings(max_examples=200, deadline=None)
@given(
    lag=st.integers(0, 2),
    steps=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40), st.integers(0, 50)), max_size=30),
)
def test_never_above_the_truth(lag: int, steps: list[tuple[int, int, int]]) -> None:
    """Against a device that is `lag` steps ahead: settles are unknown to the CPU until reported."""
    ledger, free, queued = CellLedger(TOTAL), TOTAL, 0
    waiting: deque[tuple[int, int]] = deque()
    held = 0
    for number, (pop, settle, release) in enumerate(steps, 1):
        release = min(release, held)
        ledger.credit(release)
        queued, held = queued + release, held - release
        if ledger.available < pop:
            continue
        ledger.launch(number, pop)
        free += queued
        queued = 0
        assert free >= pop
        free -= pop
        held += pop
        settled = min(settle, held)
        free, held = free + settled, held - settled
        waiting.append((number, free))
        while len(waiting) > lag:
            ledger.report(*waiting.popleft())
        assert ledger.available <= free + queued
    while waiting:
        ledger.report(*waiting.popleft())
    assert ledger.available == free + queued
