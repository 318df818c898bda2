"""Any order of events, on one rank or two: nothing is lost, nothing is promised twice, no window is pruned."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvzap_sglang.memory import cell_pool
from kvzap_sglang.step_plan import StepPlan
from tests.memory.book import BookedPool
from tests.memory.simulator import Request, Simulator
from tests.memory.truths import Seen, attention_faults, faults, seen_by, totals

PHYSICAL, HEADROOM, WAITING = 60, 3, 4
# Few different tokens, so that prefixes meet, branch and split in every way.
STEMS = [[random.Random(stem).randrange(3) for _ in range(40)] for stem in range(3)]
THRESHOLDS = st.sampled_from([None, None, None, "off", {"threshold": 0.1}])
PICK = st.integers(0, 7)
# Drawn evenly: hypothesis' integers are small ones most of the time, and short prompts meet nothing.
LENGTH, MAX_NEW, CHUNK = (st.sampled_from(range(1, most + 1)) for most in (40, 12, 16))


class Exchange:
    """`GatherReports` of ranks that run in threads of this process, one at a time between two exchanges."""

    def __init__(self, ranks: int) -> None:
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(ranks, timeout=60)
        self._sent: dict[int, torch.Tensor] = {}

    def of(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def gather(report: torch.Tensor) -> torch.Tensor:
            self._sent[rank] = report
            self.turn.release()
            try:
                self.barrier.wait()
                parts = [self._sent[other] for other in sorted(self._sent)]
                self.barrier.wait()  # nobody sends again before all have read
            finally:
                self.turn.acquire()
            return torch.stack(parts)

        return gather


class Ranks:
    """The same events on every rank of a model, which must answer alike."""

    def __init__(self, ranks: int, seed: int, **options: Any) -> None:
        self._exchange = Exchange(ranks)
        self._threads = ThreadPoolExecutor(ranks)
        self.all = [
            Simulator(
                seed=seed + rank,
                tokens=random.Random(seed),
                pool=BookedPool,
                ranks=ranks,
                rank=rank,
                gather=self._exchange.of(rank),
                **options,
            )
            for rank in range(ranks)
        ]

    def each(self, event: Callable[[Simulator], Any]) -> Any:
        """Run `event` on every rank. Its result, which is the same on all."""

        def run(simulator: Simulator) -> Any:
            with self._exchange.turn:
                try:
                    return event(simulator)
                except BaseException:
                    self._exchange.barrier.abort()
                    raise

        futures = [self._threads.submit(run, simulator) for simulator in self.all]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        results = [future.result() for future in futures]
        assert all(result == results[0] for result in results), f"ranks answer {results}"
        return results[0]

    def close(self) -> None:
        self._threads.shutdown()


def scheduling_state(simulator: Simulator) -> dict[str, Any]:
    """All that decides what a scheduler does next."""
    tree, allocator = simulator.tree, simulator.allocator

    def describe(node: Any) -> tuple[Any, ...]:
        sets = node.head_token_sets
        flags = [getattr(sets, name).tolist() for name in ("packed", "counts", "known", "settled", "healed")]
        return [list(n.key.token_ids) for n in tree.path(node)], node.value.tolist(), node.lock_ref, flags

    return {
        "available cells": allocator.ledger.available,
        "available slots": allocator.available_size(),
        "evictable": (tree.evictable_cells, tree.evictable_size(), tree.protected_size()),
        "nodes": sorted(map(describe, tree.nodes()), key=repr),
        "dense nodes": sorted(len(tree.path(node)) for node in tree.dense_nodes),
        "counters": totals(simulator)[:-1],  # what was pruned so far differs from rank to rank
        "kept": allocator.kept_fractions.means(),
    }


class Machine(RuleBasedStateMachine):
    """Events as hypothesis orders them. Requests are named by their place in a simulator's lists."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[list[Request]] = []  # one entry a request, in it one a rank
        self.numbers = 0
        self.ranks: Ranks | None = None
        self._patches = ExitStack()

    @initialize(
        lag=st.integers(0, 1),
        sparse=st.booleans(),
        recompute=st.booleans(),
        window=st.sampled_from([0, 1, 4, 16]),
        removed=st.sampled_from([0.0, 0.6, 0.6, 1.0]),
        ranks=st.integers(1, 2),
        seed=st.integers(0, 2**31),
    )
    def start(self, ranks: int, seed: int, **options: Any) -> None:
        # Short enough that these requests' prompts are sorted and compacted.
        self._patches.enter_context(mock.patch.object(cell_pool, "COMPACT_FROM_TOKENS", 6))
        self._patches.enter_context(mock.patch.object(cell_pool, "SORT_FROM_TOKENS", 4))
        self.ranks = Ranks(ranks, seed, physical=PHYSICAL, headroom=HEADROOM, **options)
        self.seen: list[dict[Request, Seen]] = [{} for _ in self.ranks.all]
        self.totals = [totals(simulator) for simulator in self.ranks.all]
        for simulator, seen in zip(self.ranks.all, self.seen, strict=True):
            simulator.attention = partial(self._attend, simulator, seen)

    # -- events -----------------------------------------------------------------------------

    @precondition(lambda self: self.first.chunked is None)
    @rule(stem=PICK, length=LENGTH, max_new=MAX_NEW, threshold=THRESHOLDS, chunk=CHUNK)
    def serve(self, stem: int, length: int, max_new: int, threshold: Any, chunk: int) -> None:
        """A prompt arrives and is computed at once."""
        self._arrive(stem, length, max_new, threshold)
        while self.first.chunked is not None:
            if not self.ranks.each(lambda simulator: simulator.prefill_chunk(chunk)):
                return
            self.check()

    @precondition(lambda self: self.first.chunked is None)
    @rule(stem=PICK, length=LENGTH, max_new=MAX_NEW, threshold=THRESHOLDS)
    def admit(self, stem: int, length: int, max_new: int, threshold: Any) -> None:
        self._arrive(stem, length, max_new, threshold)

    @precondition(lambda self: self.waiting and self.first.chunked is None)
    @rule()
    def resume(self) -> None:
        self._admit(self.waiting.pop(0))

    @precondition(lambda self: self.first.chunked is not None)
    @rule(chunk=CHUNK)
    def prefill(self, chunk: int) -> None:
        self.ranks.each(lambda simulator: simulator.prefill_chunk(chunk))

    @precondition(lambda self: self.first.running)
    @rule(times=st.sampled_from(range(1, 9)))
    def decode(self, times: int) -> None:
        for _ in range(times):
            self.ranks.each(Simulator.decode)
            self.check()

    @precondition(lambda self: self.first.running)
    @rule(pick=PICK)
    def stop_early(self, pick: int) -> None:
        self._with_running(pick, Simulator.finish)

    @precondition(lambda self: self.first.running)
    @rule(pick=PICK)
    def retract(self, pick: int) -> None:
        again: dict[int, Request] = {}

        def event(simulator: Simulator, request: Request) -> None:
            again[simulator.tree.shape.rank] = simulator.retract(request)

        self._with_running(pick, event)
        if again:
            self.waiting = [*self.waiting, [again[rank] for rank in sorted(again)]][:WAITING]

    @precondition(lambda self: self.first.chunked is not None)
    @rule()
    def abort(self) -> None:
        self.ranks.each(Simulator.abort_chunked)

    @rule(tokens=st.integers(1, 30))
    def evict(self, tokens: int) -> None:
        self.ranks.each(lambda simulator: simulator.evict(tokens))

    @rule(cells=st.integers(1, 60))
    def reclaim(self, cells: int) -> None:
        self.ranks.each(lambda simulator: simulator.reclaim(cells))

    @precondition(lambda self: self.first.results)
    @rule()
    def settle_results(self) -> None:
        self.ranks.each(Simulator.settle_results)

    @precondition(lambda self: not (self.first.running or self.first.chunked or self.first.results))
    @rule()
    def flush(self) -> None:
        assert self.ranks.each(Simulator.flush)
        for simulator in self.ranks.all:
            assert simulator.allocator.available_cells() == simulator.pool.layout.cells_total

    # -- what must hold -----------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        if self.ranks is None:
            return
        for number, simulator in enumerate(self.ranks.all):
            assert faults(simulator, self.seen[number]) == []
            now = totals(simulator)
            assert all(0 <= before <= after for before, after in zip(self.totals[number], now, strict=True))
            self.totals[number] = now
            if not simulator.results and not simulator.unlaunched:
                # The idle checks of a server, and the exact count where this process may use it.
                simulator.allocator.ledger.launches += 1
                assert simulator.allocator.verify_byte_accounting() == []
        states = [scheduling_state(simulator) for simulator in self.ranks.all]
        differing = [name for name in states[0] if states[0][name] != states[-1][name]]
        assert not differing, f"ranks differ in {differing}"

    def teardown(self) -> None:
        try:
            if self.ranks is not None:
                self._end_everything()
        finally:
            self._patches.close()

    def _end_everything(self) -> None:
        self.ranks.each(Simulator.abort_chunked)
        self.ranks.each(Simulator.settle_results)
        while self.first.running:
            self._finish_first()
        self.check()
        self.ranks.each(lambda simulator: simulator.evict(10_000))
        for simulator in self.ranks.all:
            allocator = simulator.allocator
            assert allocator.available_cells() == simulator.pool.free_cells == simulator.pool.layout.cells_total
            assert allocator.available_size() == allocator.size
            assert not simulator.tree.rows and not simulator.tree.evictable_cells
        self.ranks.close()

    # -- internals ----------------------------------------------------------------------------

    @property
    def first(self) -> Simulator:
        return self.ranks.all[0]

    def _arrive(self, stem: int, length: int, max_new: int, threshold: Any) -> None:
        self.numbers += 1
        prompt = STEMS[stem % len(STEMS)][:length]
        self._admit([Request(self.numbers, prompt, max_new, threshold) for _ in self.ranks.all])

    def _admit(self, requests: list[Request]) -> None:
        if self.ranks.each(lambda simulator: simulator.admit(requests[simulator.tree.shape.rank])):
            for number, simulator in enumerate(self.ranks.all):
                self.seen[number][requests[number]] = seen_by(simulator, requests[number])
        else:
            self.waiting = [*self.waiting, requests][:WAITING]

    @staticmethod
    def _attend(simulator: Simulator, seen: dict[Request, Seen], plan: StepPlan) -> None:
        assert attention_faults(simulator, plan, seen) == []

    def _with_running(self, pick: int, event: Callable[[Simulator, Request], Any]) -> None:
        """`event` for one request that has a token to show."""

        def run(simulator: Simulator) -> None:
            if candidates := [request for request in simulator.running if request.output_ids]:
                event(simulator, candidates[pick % len(candidates)])

        self.ranks.each(run)

    def _finish_first(self) -> None:
        self.ranks.each(lambda simulator: simulator.finish(simulator.running[0]))


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=30,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
