"""Requests that branch at once where a window is pruned: one recomputes it, the others wait for that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvzap_sglang.sharing.turns import waits_for_its_branch
from tests.memory.simulator import LAYERS, Request, Simulator
from tests.sharing.simulated import make, start

STEM = list(range(60))
WINDOW, DEPTH = 4, 4 * LAYERS
END = 40
"""Where the branches leave the stem, all of whose windows are pruned there."""


def branch(number: int, end: int = END) -> Request:
    return Request(number, [*STEM[:end], *range(100 * number, 100 * number + 6)], 50)


def settled(*, sparse: bool = True, recompute: bool = True, lag: int = 0) -> Simulator:
    """A tree that holds the stem, pruned but for its last window."""
    simulator = make(window=WINDOW, sparse=sparse, recompute=recompute, lag=lag)
    simulator.finish(start(simulator, STEM))
    simulator.settle_results()
    return simulator


@pytest.mark.parametrize(
    ("chunk", "lag", "waits"),
    [
        (64, 0, False),
        (64, 1, True),
        (7, 1, True),
        pytest.param(3, 1, False, id="healed-before-the-prompt's-last-chunk"),
    ],
)
def test_the_second_waits_until_the_first_has_healed_and_recomputes_nothing(chunk: int, lag: int, waits: bool) -> None:
    simulator = settled(lag=lag)
    tree, first, second = simulator.tree, branch(1), branch(2)
    assert simulator.admit(first)
    while simulator.chunked is not None:
        assert simulator.prefill_chunk(chunk)
    if waits:
        assert not simulator.admit(second)
        simulator.settle_results()
    assert simulator.admit(second) and second.prefix_len == END
    assert simulator.prefill_chunk(64)
    simulator.settle_results()
    assert tree.recomputed_tokens == DEPTH and simulator.check() == []


@pytest.mark.parametrize(("sparse", "recompute"), [(False, True), (False, False), (True, False)])
def test_nobody_waits_where_a_branch_costs_a_window_or_nothing(sparse: bool, recompute: bool) -> None:
    simulator = settled(sparse=sparse, recompute=recompute, lag=1)
    assert simulator.admit(branch(1)) and simulator.prefill_chunk(64)
    assert simulator.admit(branch(2))


@pytest.mark.parametrize(
    ("end", "waits"),
    [
        pytest.param(END + 1, True, id="just-below"),
        pytest.param(END + DEPTH // 2, True, id="half-of-it"),
        pytest.param(END + DEPTH // 2 + 1, False, id="less-than-half"),
        pytest.param(END - 1, False, id="above-where-the-healed-window-does-not-help"),
        pytest.param(len(STEM), False, id="at-a-window-that-is-whole"),
    ],
)
def test_it_waits_only_for_what_saves_half(end: int, waits: bool) -> None:
    simulator = settled(lag=1)
    assert simulator.admit(branch(1)) and simulator.prefill_chunk(64)
    assert simulator.admit(branch(2, end)) is not waits
    simulator.abort_chunked()


def test_it_goes_on_when_the_first_one_is_aborted() -> None:
    simulator = settled()
    first, second = branch(1), branch(2)
    assert simulator.admit(first) and simulator.prefill_chunk(3)
    simulator.abort_chunked()
    assert simulator.admit(second) and second.prefix_len == END - DEPTH


def test_it_waits_for_one_of_the_same_batch() -> None:
    simulator = settled()
    first, second = branch(1), branch(2)
    assert simulator.admit(first)
    simulator.chunked = None  # so that the second can be matched beside it
    assert simulator.admit(second)
    assert waits_for_its_branch(simulator.tree, second, [first])
    assert not waits_for_its_branch(simulator.tree, second, [])
    whole = SimpleNamespace(last_node=second.last_node, prefix_len=END)  # recomputes nothing
    assert not waits_for_its_branch(simulator.tree, second, [whole])


def test_it_does_not_wait_for_one_that_already_generates() -> None:
    """Its prompt's result would have healed the branch; what it keeps to itself after that comes when it ends."""
    simulator = settled(lag=5)
    first, second = branch(1), branch(2)
    assert simulator.admit(first) and simulator.prefill_chunk(64)
    row = simulator.tree.rows[first.kv.req_pool_idx]
    assert row.heal_start < row.heal_end and not simulator.admit(second)
    row.launch(row.prompt_end + 1)
    assert simulator.admit(second)
