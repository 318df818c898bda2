"""Admission plans with what the cells allow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvzap_sglang.memory.budget import Admissions, KVPressPrefillBudget
from kvzap_sglang.memory.kept_fraction import MAX_CLASSES, KeptFraction, KeptFractions

CELLS_PER_TOKEN = 10
PRUNED, DENSE = -3.0, 0.0  # thresholds of two classes of requests; the second keeps everything


def make_budget(
    *,
    free_tokens: int,
    kept: float,
    sparse: bool = False,
    keep: bool = False,
    slots: int = 10_000,
    running: float = 1e-6,
) -> KVPressPrefillBudget:
    """`running`: tokens that running requests may still generate; by default there is one that is about to end."""
    layout = SimpleNamespace(cells_per_token=CELLS_PER_TOKEN)
    allocator: Any = SimpleNamespace(
        page_size=1,
        available_size=lambda: slots,
        available_cells=lambda: free_tokens * CELLS_PER_TOKEN,
        cells=SimpleNamespace(layout=layout),
        kept_fractions=SimpleNamespace(of=lambda threshold: SimpleNamespace(planned=kept if threshold else 1.0)),
        admissions=Admissions(),
    )
    tree = SimpleNamespace(
        window=100,
        sparse_prefill=sparse,
        prunes_generated=not keep,
        evictable_cells=0,
        evictable_size=lambda: 0,
        supports_mamba=lambda: False,
        rows={1: SimpleNamespace(threshold=PRUNED)},
    )
    budget = KVPressPrefillBudget(allocator, tree)
    budget.consider(PRUNED)
    budget.total_offset += running  # as SGLang's adder does for running requests
    return budget


def admits(budget: KVPressPrefillBudget, extend: int, new: int, chunk: int | None = None) -> bool:
    fits, _ = budget.check_prefill(
        extend_input_len=extend,
        total_tokens=extend + new,
        max_new_tokens=new,
        input_tokens=extend,
        swa_host_hit_length=0,
        chunk_limit=chunk,
    )
    return fits


def test_nothing_pruned_is_stock() -> None:
    budget = make_budget(free_tokens=1000, kept=1.0)
    assert admits(budget, 600, 399)
    assert not admits(budget, 600, 400)


def test_generated_tokens_cost_what_is_kept() -> None:
    budget = make_budget(free_tokens=1000, kept=0.25)
    assert admits(budget, 600, 2900)  # 0.25 * 3500 + 0.75 * 100 = 950
    assert not admits(budget, 600, 3200)


def test_a_dense_prompt_needs_its_peak() -> None:
    assert not admits(make_budget(free_tokens=500, kept=0.1), 501, 1, chunk=64)


def test_a_sparse_prompt_needs_a_chunk_and_what_is_kept() -> None:
    budget = make_budget(free_tokens=500, kept=0.1, sparse=True)
    assert admits(budget, 2000, 10, chunk=64)  # 164 + 0.1 * 1836 = 348
    assert not admits(budget, 2000, 10)  # no chunking: all at once


def test_admitted_requests_are_charged() -> None:
    budget = make_budget(free_tokens=1000, kept=0.5)
    budget.reserve(600, 100)
    assert budget.physical_remaining == pytest.approx(400)
    assert (budget.allocator.admissions.requests, budget.allocator.admissions.dense_tokens) == (1, 700)
    assert not admits(budget, 401, 1)
    assert admits(budget, 390, 1)


def test_running_requests_are_charged_at_the_kept_fraction() -> None:
    budget = make_budget(free_tokens=1000, kept=0.5, running=800)
    assert budget.physical_remaining == pytest.approx(600)


def test_a_class_that_keeps_everything_is_charged_everything() -> None:
    budget = make_budget(free_tokens=1000, kept=0.25)
    budget.consider(DENSE)
    assert not admits(budget, 600, 2900)
    assert admits(budget, 600, 399)


@pytest.mark.parametrize(
    ("sparse", "extend", "new", "chunk", "expected"),
    [
        (False, 499, 5000, 64, (True, 64)),  # the prompt fits: its answer may end early
        (False, 500, 5000, 64, (False, None)),  # it does not, and will be refused
        (True, 4000, 10, 64, (True, 64)),  # pruned chunk by chunk: nobody knows what will be kept
        (True, 4000, 10, 2048, (True, 500)),  # a chunk of what there is
        (True, 4000, 10, None, (False, None)),
    ],
)
def test_alone_a_request_starts_if_it_can(
    sparse: bool, extend: int, new: int, chunk: int | None, expected: tuple[bool, int | None]
) -> None:
    """Nothing runs that could free more: to wait would be to wait for ever."""
    asked = {"extend_input_len": extend, "total_tokens": extend + new, "max_new_tokens": new, "input_tokens": extend}
    for running, answer in ((0, expected), (1, (False, None))):
        budget = make_budget(free_tokens=500, kept=1.0, sparse=sparse, running=running)
        assert budget.check_prefill(**asked, swa_host_hit_length=0, chunk_limit=chunk) == answer


def test_slots_still_bound() -> None:
    assert not admits(make_budget(free_tokens=10_000, kept=0.1, slots=500), 400, 100)


@pytest.mark.parametrize(("free", "expected"), [(0, None), (10, 10), (500, 64)])
def test_a_chunk_gets_what_is_there_or_waits(free: int, expected: int | None) -> None:
    assert make_budget(free_tokens=free, kept=0.5).available_chunk_tokens(64) == expected


def test_the_estimate_starts_dense_and_learns() -> None:
    estimate = KeptFraction()
    assert estimate.planned == 1.0
    estimate.observe(0, 0, 0)
    for _ in range(200):
        estimate.observe(300, 1000, 1000)
    assert estimate.mean == pytest.approx(0.3, abs=0.01)
    assert estimate.planned == pytest.approx(0.33, abs=0.011)
    for _ in range(400):
        estimate.observe(1000, 1000, 1000)
    assert estimate.mean > 0.95  # it forgets


def test_classes_of_requests_are_estimated_apart() -> None:
    estimates = KeptFractions()
    for _ in range(100):
        estimates.of(-3.0).observe(100, 1000, 1000)
        estimates.of(-6.0).observe(900, 1000, 1000)
    assert estimates.of(-3.0).mean < 0.11 and estimates.of(-6.0).mean > 0.89
    assert estimates.served() == pytest.approx(0.5, abs=0.01)
    for threshold in range(40):
        estimates.of(float(threshold)).observe(1, 1, 1)
    assert len(estimates.means()) == MAX_CLASSES


def test_generated_tokens_that_are_kept_are_charged_in_full() -> None:
    """A prompt of 600 of which a quarter of 500 stays, and 300 new ones."""
    assert admits(make_budget(free_tokens=700, kept=0.25), 600, 300)
    assert not admits(make_budget(free_tokens=520, kept=0.25, keep=True), 200, 400)
    assert admits(make_budget(free_tokens=530, kept=0.25, keep=True), 200, 400)
