"""Faults of shared prefixes that other servers had (docs/fault-kinds.md), each on real tree, allocator and cells."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvzap_sglang.request_options import cache_namespace
from tests.memory.simulator import CONFIG, Request
from tests.memory.written import WrittenSimulator

BOTH_RULES = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
LAGS = pytest.mark.parametrize("lag", [0, 1])


@pytest.fixture(autouse=True)
def seed() -> None:
    random.seed(1)
    torch.manual_seed(1)


def make(*, physical: int = 200, headroom: int = 2, **options: Any) -> WrittenSimulator:
    defaults: dict[str, Any] = {"window": 4, "lag": 1, "removed": 0.6, "sparse": False, "recompute": False}
    return WrittenSimulator(physical=physical, headroom=headroom, **(defaults | options))


def prefill(simulator: WrittenSimulator, request: Request, chunk: int = 8) -> None:
    """Admit and launch the whole prompt."""
    assert simulator.admit(request)
    while simulator.chunked is request:
        assert simulator.prefill_chunk(chunk)


def serve(simulator: WrittenSimulator, request: Request, chunk: int = 8) -> None:
    """From admission to release."""
    prefill(simulator, request, chunk)
    simulator.settle_results()
    while not request.done:
        assert simulator.decode()
        simulator.settle_results()


def check(simulator: WrittenSimulator) -> None:
    assert simulator.check() == []
    assert simulator.foreign() == []
    assert simulator.slots_missing() == 0


def check_empty(simulator: WrittenSimulator) -> None:
    """Everything comes back."""
    simulator.settle_results()
    for request in list(simulator.running):
        simulator.finish(request)
    check(simulator)
    simulator.evict(10_000)
    assert simulator.allocator.available_cells() == simulator.pool.layout.cells_total
    assert simulator.allocator.available_size() == simulator.allocator.size
    assert simulator.tree.rows == {} and simulator.tree.evictable_cells == 0 and not simulator.tree.dense_nodes


def prompt(first: int, length: int) -> list[int]:
    return list(range(first, first + length))


def aborted_after_two_chunks(**options: Any) -> tuple[WrittenSimulator, set[int]]:
    """The first chunk of prompt(0, 30) is in the tree; the slots of the second were freed. No slot is left unused."""
    simulator = make(physical=44, headroom=1, **options)
    request = Request(1, prompt(0, 30), 2)
    assert simulator.admit(request)
    assert simulator.prefill_chunk(8) and simulator.prefill_chunk(8)
    freed = set(simulator.row_slots(request)[8:].tolist())
    simulator.abort_chunked()
    return simulator, freed


@LAGS
@BOTH_RULES
@pytest.mark.parametrize("recompute", [False, True], ids=["accept", "recompute"])
def test_a_prefix_survives_the_abort_of_who_computed_it(lag: int, sparse: bool, recompute: bool) -> None:
    """Chunk 1 is published, the request aborts, another is computed over what it freed, a third hits chunk 1."""
    simulator, freed = aborted_after_two_chunks(lag=lag, sparse=sparse, recompute=recompute)
    other = Request(2, prompt(100, 32), 3)
    prefill(simulator, other)
    assert freed & set(simulator.row_slots(other).tolist())
    check(simulator)
    simulator.settle_results()
    simulator.finish(other)
    again = Request(3, prompt(0, 10), 2)
    assert simulator.admit(again)
    assert again.prefix_len == 8 if not recompute else 0 <= again.prefix_len <= 8
    while simulator.chunked is again:
        assert simulator.prefill_chunk(8)
    check(simulator)
    check_empty(simulator)


def test_the_check_sees_a_prefix_that_was_freed_with_its_request() -> None:
    """The fault itself, planted: the tree's slots go back with the aborted request's own."""
    simulator, _ = aborted_after_two_chunks()
    (node,) = simulator.tree.nodes()
    simulator.allocator.free(node.value)
    simulator.allocator.ledger.credit(node.head_token_sets.cells())
    prefill(simulator, Request(2, prompt(100, 40), 3))
    assert simulator.foreign() and simulator.slots_missing()


def tree_state(simulator: WrittenSimulator, request: Request) -> tuple[Any, ...]:
    nodes = [(node.id, node.lock_ref, node.value.tolist()) for node in simulator.tree.nodes()]
    allocator, tree = simulator.allocator, simulator.tree
    counts = (allocator.available_size(), allocator.ledger.available, tree.evictable_cells, tree.protected_size())
    return nodes, counts, request.kv.cache_protected_len, simulator.row_slots(request).tolist()


@LAGS
@BOTH_RULES
def test_a_chunk_published_twice_is_published_once(lag: int, sparse: bool) -> None:
    simulator = make(lag=lag, sparse=sparse)
    request = Request(1, prompt(0, 30), 3)
    assert simulator.admit(request)
    while simulator.chunked is request:
        assert simulator.prefill_chunk(7)
        if simulator.chunked is None:
            break
        simulator.tree.checkpoint(request, up_to=request.extend_end)
        once = tree_state(simulator, request)
        for _ in range(2):
            simulator.tree.checkpoint(request, up_to=request.extend_end)
        assert tree_state(simulator, request) == once
        check(simulator)
    check_empty(simulator)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 13), min_size=1, max_size=8),
    shared=st.integers(0, 40),
    lag=st.integers(0, 1),
    sparse=st.booleans(),
    recompute=st.booleans(),
)
def test_three_lengths_stay_apart(sizes: list[int], shared: int, lag: int, sparse: bool, recompute: bool) -> None:
    """Logical, tree-owned and kept lengths all differ here, for any chunks and any shared prefix: no slot is lost."""
    simulator = make(lag=lag, sparse=sparse, recompute=recompute)
    serve(simulator, Request(1, prompt(0, 40), 3))
    request = Request(2, prompt(0, shared) + prompt(100, 41 - shared), 9)
    assert simulator.admit(request)
    number = 0
    while simulator.chunked is request:
        assert simulator.prefill_chunk(sizes[number % len(sizes)])
        number += 1
        assert request.kv.cache_protected_len <= request.extend_end == request.kv.kv_allocated_len
        check(simulator)
    check_empty(simulator)


def test_two_mappings_of_the_last_prompt_token() -> None:
    """A fully cached prompt computes its last token anew, and the tree has it too: a step launched before the result
    reads the new cells, later ones the tree's. Both are whole and right as long as somebody reads them."""
    simulator = make(lag=1, sparse=True)
    serve(simulator, Request(1, prompt(0, 20), 6))
    request = Request(2, prompt(0, 20), 6)
    prefill(simulator, request)
    assert request.prefix_len == 19
    launched = simulator.row_slots(request)
    check(simulator)
    simulator.settle_results()
    later = simulator.row_slots(request)
    assert torch.equal(launched[:19], later[:19]) and launched[19] != later[19]
    (tail,) = (node for node in simulator.tree.nodes() if later[19] in node.value)
    assert tail.lock_ref == 1
    # The step that was launched with the first mapping has not run yet, for all that the scheduler did since.
    assert int(simulator.pool.held(launched[19:])) == simulator.pool.layout.cells_per_token
    assert simulator.pool.held(later[19:]) > 0
    assert simulator.decode()
    assert int(simulator.pool.held(launched[19:])) == 0
    check(simulator)
    check_empty(simulator)


@LAGS
def test_a_dense_prompt_keeps_its_own_last_token(lag: int) -> None:
    """The same prompt where the prefix is seen pruned: the last token is another than the tree's, and stays private to
    the end, whole as long as it is in the window."""
    simulator = make(lag=lag, sparse=False)
    serve(simulator, Request(1, prompt(0, 20), 6))
    request = Request(2, prompt(0, 20), 6)
    prefill(simulator, request)
    assert request.prefix_len == 19
    launched = simulator.row_slots(request)
    simulator.settle_results()
    assert torch.equal(launched, simulator.row_slots(request)) and request.kv.cache_protected_len == 19
    assert int(simulator.pool.held(launched[19:])) == simulator.pool.layout.cells_per_token
    check(simulator)
    while not request.done:
        assert simulator.decode()
        simulator.settle_results()
    check_empty(simulator)


@LAGS
@pytest.mark.parametrize("same", [True, False])
def test_a_dense_prefill_takes_others_cells_only_when_they_are_its_own(lag: int, same: bool) -> None:
    """Two requests compute the same 30 tokens at once. Both from nothing: their cells are equal, and one copy is enough.
    One after a cached prefix, which it saw pruned: they are not, and each keeps its own until it leaves."""
    simulator = make(lag=lag, sparse=False)
    first, second = Request(1, prompt(0, 40), 6), Request(2, prompt(0, 40), 6)
    assert simulator.admit(first) and simulator.prefill_chunk(10)
    parked, simulator.chunked = simulator.chunked, None  # its other tokens wait
    if not same:
        simulator.tree.checkpoint(first, up_to=10)
        first.prefix_len = 10
        simulator.settle_results()
    assert simulator.admit(second)
    assert second.prefix_len == (0 if same else 10)
    while simulator.prefill_chunk(99):
        pass
    simulator.settle_results()
    simulator.chunked = parked
    own = simulator.row_slots(first)
    while simulator.prefill_chunk(99):
        pass
    simulator.settle_results()
    shared = torch.equal(simulator.row_slots(first)[:40], simulator.row_slots(second)[:40])
    assert shared == same and len(own) < 40
    while simulator.decode():
        pass
    simulator.settle_results()
    check(simulator)
    check_empty(simulator)


@BOTH_RULES
def test_an_abort_before_the_decisions_leaves_nothing_half_known(sparse: bool) -> None:
    """A chunk is published and its request aborted before its decisions came back: they still reach the node."""
    simulator = make(sparse=sparse)
    request = Request(1, prompt(0, 30), 2)
    assert simulator.admit(request) and simulator.prefill_chunk(8)
    simulator.tree.checkpoint(request, up_to=8)
    simulator.abort_chunked()
    (node,) = simulator.tree.nodes()
    assert not node.head_token_sets.known.any()
    simulator.settle_results()
    assert node.head_token_sets.known.all()
    check(simulator)
    check_empty(simulator)


def test_decisions_that_come_after_their_node_was_evicted_change_nothing() -> None:
    simulator = make()
    request = Request(1, prompt(0, 30), 2)
    assert simulator.admit(request) and simulator.prefill_chunk(8)
    simulator.tree.checkpoint(request, up_to=8)
    simulator.abort_chunked()
    simulator.evict(10_000)
    assert not list(simulator.tree.nodes())
    serve(simulator, Request(2, prompt(0, 8), 1))
    simulator.settle_results()
    check(simulator)
    check_empty(simulator)


@BOTH_RULES
def test_slots_of_an_evicted_prefix_forget_its_decisions(sparse: bool) -> None:
    """The same slots under another prefix carry the new decisions, and nothing of the old node is reachable."""
    simulator = make(physical=40, headroom=1, removed=0.0, sparse=sparse)
    serve(simulator, Request(1, prompt(0, 30), 3))
    old = {slot for node in simulator.tree.nodes() for slot in node.value.tolist()}
    assert simulator.tree.path_sets(next(simulator.tree.nodes()), 30).counts.all()
    simulator.evict(10_000)
    assert not list(simulator.tree.nodes()) and not simulator.tree.dense_nodes and not simulator.tree.evictable_cells
    simulator.runtime.step.press.removed = 1.0  # type: ignore[attr-defined]
    request = Request(2, prompt(100, 30), 3)
    serve(simulator, request)
    now = {slot for node in simulator.tree.nodes() for slot in node.value.tolist()}
    assert len(old & now) > 20
    assert not simulator.tree.path_sets(request.last_node, 30).packed.any()
    check(simulator)
    check_empty(simulator)


@pytest.mark.parametrize("shared", [20, 13], ids=["a whole node", "part of a node"])
@BOTH_RULES
def test_a_locked_prefix_survives_the_eviction_of_everything(shared: int, sparse: bool) -> None:
    """Matched and locked, not launched yet; then the whole tree is evicted and its dense tails are reclaimed."""
    simulator = make(sparse=sparse)
    serve(simulator, Request(1, prompt(0, 20), 6))
    serve(simulator, Request(2, prompt(50, 20), 6))
    request = Request(3, prompt(0, shared) + prompt(80, 5), 2)
    assert simulator.admit(request) and request.prefix_len == shared
    slots = simulator.tree.path_device_indices(request.last_node)
    held = simulator.pool.held(slots).tolist()
    simulator.tree.settler.reclaim(simulator.pool.layout.cells_total)
    simulator.evict(10_000)
    simulator.allocator.drain()
    assert simulator.tree.evictable_size() == 0 and simulator.tree.protected_size() == shared
    assert simulator.pool.held(slots).tolist() == held and sum(held[-4:]) > 0
    while simulator.chunked is request:
        assert simulator.prefill_chunk(8)
    check(simulator)
    check_empty(simulator)


def namespaces() -> Iterator[tuple[Any, str | None]]:
    """(threshold option, extra key) of requests none of which may share with another."""
    yield from ((None, None), ("off", None), ({"threshold": 0.1}, None), ({"threshold": -0.1}, None))
    yield from ((None, "tenant"), ({"threshold": 0.1}, "tenant"), ({"threshold": 0.1}, ""))
    # Names that pretend to be ours.
    yield from ((None, "kv_press threshold 0.1 'tenant'"), (None, "kv_press threshold 0.1 None"))


def named(number: int, threshold: Any, extra_key: str | None) -> Request:
    request = Request(number, prompt(0, 30), 3, threshold)
    request.extra_key = cache_namespace(extra_key, request.sampling_params.custom_params, CONFIG)
    return request


def test_one_prompt_under_every_namespace_shares_nothing() -> None:
    simulator = make(physical=900)
    for number, (threshold, extra_key) in enumerate(namespaces()):
        request = named(number, threshold, extra_key)
        prefill(simulator, request)
        assert simulator.tree.rows[request.kv.req_pool_idx].hit == 0, (threshold, extra_key)
        simulator.settle_results()
        check(simulator)
        simulator.finish(request)
    for number, (threshold, extra_key) in enumerate(namespaces()):
        request = named(100 + number, threshold, extra_key)
        prefill(simulator, request)
        assert simulator.tree.rows[request.kv.req_pool_idx].hit == 29, (threshold, extra_key)
        simulator.settle_results()
        check(simulator)
        simulator.finish(request)
    check_empty(simulator)


@LAGS
@BOTH_RULES
@pytest.mark.parametrize("tokens", [1, 2, 5, 10])
def test_a_retracted_request_starts_anew(tokens: int, lag: int, sparse: bool) -> None:
    """At each stage: its row state is dropped and rebuilt, and its second life reads its own rows only."""
    simulator = make(lag=lag, sparse=sparse)
    neighbour, request = Request(1, prompt(0, 25), 40), Request(2, prompt(0, 12) + prompt(60, 9), 12)
    for each in (neighbour, request):
        prefill(simulator, each)
    simulator.settle_results()
    while len(request.output_ids) < tokens:
        assert simulator.decode()
    before = simulator.tree.rows[request.kv.req_pool_idx]
    again = simulator.retract(request)
    assert before not in simulator.tree.rows.values()
    check(simulator)
    prefill(simulator, again)
    assert simulator.tree.rows[again.kv.req_pool_idx] is not before
    simulator.settle_results()
    while not again.done:
        assert simulator.decode()
        check(simulator)
    assert len(again.output_ids) == 12
    check_empty(simulator)


@pytest.mark.parametrize("short_of", ["cells", "slots"])
def test_an_allocation_that_fails_changes_nothing(short_of: str) -> None:
    """The k-th allocation finds no room: slots, cells and ledger are what they were, and the request can go on later."""
    simulator = make(physical=40, headroom=3 if short_of == "cells" else 1, removed=0.0 if short_of == "cells" else 1.0)
    filler, request = Request(1, prompt(0, 20), 15), Request(2, prompt(100, 30), 1)
    prefill(simulator, filler)
    assert simulator.admit(request)
    launched = 0
    while simulator.prefill_chunk(6):
        launched += 1
        assert simulator.chunked is request
    simulator.settle_results()
    allocator = simulator.allocator
    before = (tree_state(simulator, request), allocator.free_pages.tolist(), simulator.pool.table.clone())
    assert launched >= 1 and not simulator.prefill_chunk(6)
    after = (tree_state(simulator, request), allocator.free_pages.tolist(), simulator.pool.table)
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])
    check(simulator)
    simulator.finish(filler)
    simulator.evict(10_000)
    while simulator.chunked is request:
        assert simulator.prefill_chunk(6)
    check_empty(simulator)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), lag=st.integers(0, 1), sparse=st.booleans(), recompute=st.booleans())
def test_nobody_reads_another_tokens_rows(seed: int, lag: int, sparse: bool, recompute: bool) -> None:
    """Any order of events on a pool of 1.2 requests that evicts all the time: every cell is its token's."""
    rng = random.Random(seed)
    random.seed(seed)
    torch.manual_seed(seed)
    simulator = make(physical=60, headroom=1, lag=lag, sparse=sparse, recompute=recompute)
    stems = [[rng.randrange(3) for _ in range(36)] for _ in range(2)]
    for number in range(60):
        running = [request for request in simulator.running if request.output_ids]
        match rng.choice(["admit", "chunk", "chunk", "decode", "decode", "retract", "abort", "stop"]):
            case "admit":
                simulator.admit(Request(number, rng.choice(stems)[: rng.randint(1, 36)], rng.randint(1, 12)))
            case "chunk":
                simulator.prefill_chunk(rng.randint(1, 16))
            case "decode":
                simulator.decode()
            case "retract" if running:
                simulator.retract(rng.choice(running))
            case "stop" if running:
                simulator.finish(rng.choice(running))
            case "abort" if rng.random() < 0.3:
                simulator.abort_chunked()
        check(simulator)
    simulator.abort_chunked()
    check_empty(simulator)
