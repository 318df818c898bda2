"""Every kind of corruption, planted on a healthy idle server's memory: what production runs says which one it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker
from sglang.srt.mem_cache.radix_cache import TreeNode

from kvzap_sglang.kernels.encoding import CELL_MASK, NONE
from kvzap_sglang.memory import allocator as allocator_module
from tests.memory.simulator import Request, Simulator

WINDOW = 4


def served(simulator: Simulator, prompt: list[int], max_new: int) -> None:
    """Serve one request to its end."""
    request = Request(len(prompt), prompt, max_new)
    assert simulator.admit(request)
    while simulator.chunked is not None:
        assert simulator.prefill_chunk(16)
    while not request.done:
        simulator.decode()
        simulator.settle_results()


def idle_server() -> Simulator:
    """Two finished conversations that branch after 20 tokens, checked by nobody yet."""
    simulator = Simulator(
        physical=200, headroom=2, window=WINDOW, lag=1, removed=0.6, sparse=False, seed=1, tokens=random.Random(1)
    )
    for tail in (1, 2):
        served(simulator, [*range(20), *[tail + 50] * 10], 6)
    simulator.allocator.available_cells()  # drains
    return simulator


def production_faults(simulator: Simulator) -> list[str]:
    """SGLang's leak equation and the idle check, as `Scheduler.on_idle` runs them."""
    tree, allocator = simulator.tree, simulator.allocator
    leak, message = SchedulerInvariantChecker._check_pool_invariant(
        "full", allocator.available_size(), tree.evictable_size(), tree.protected_size(), 0, allocator.size
    )
    return ([message] if leak else []) + allocator.verify_byte_accounting()


def leaf(simulator: Simulator) -> TreeNode:
    """The end of the older conversation: its last window is dense."""
    return min(simulator.tree.evictable_leaves, key=lambda node: node.last_access_time)


def trunk(simulator: Simulator) -> TreeNode:
    """The prompt that the conversations share, settled."""
    return next(iter(simulator.tree.root_node.children.values()))


def slot_with(simulator: Simulator, *, cell: bool) -> tuple[int, int]:
    """(slot, head) of a leaf's pair in layer 0 that has a cell, or of the trunk's that has none."""
    slots = leaf(simulator).value if cell else trunk(simulator).value
    found = torch.nonzero((simulator.pool.table[0, slots] >= 0) == cell)[0]
    return int(slots[found[0]]), int(found[1])


# -- how to break it -----------------------------------------------------------------------------


def free_a_cell_twice(simulator: Simulator) -> None:
    slot, head = slot_with(simulator, cell=True)
    simulator.pool._push(simulator.pool.table[0, slot, head].view(1) & CELL_MASK)


def free_everything_again(simulator: Simulator) -> None:
    simulator.pool._push(torch.arange(1, simulator.pool.layout.cells_total + 1, dtype=torch.int32))


def stack_a_cell_twice(simulator: Simulator) -> None:
    simulator.pool._stack[0] = simulator.pool._stack[1]


def free_slots_twice(simulator: Simulator) -> None:
    simulator.allocator.free(leaf(simulator).value[:3])


def lose_a_cell(simulator: Simulator) -> None:
    slot, head = slot_with(simulator, cell=True)
    simulator.pool.table[0, slot, head] = NONE


def lose_a_free_cell(simulator: Simulator) -> None:
    simulator.pool._free -= 1


def share_a_cell(simulator: Simulator) -> None:
    slot, head = slot_with(simulator, cell=True)
    empty, other = slot_with(simulator, cell=False)
    simulator.pool.table[0, empty, other] = simulator.pool.table[0, slot, head]


def keep_cells_of_a_freed_slot(simulator: Simulator) -> None:
    simulator.pool.pop(simulator.allocator.free_pages[:1])


def own_the_sink(simulator: Simulator) -> None:
    slot, head = slot_with(simulator, cell=True)
    simulator.pool.table[0, slot, head] = 0


def free_the_sink(simulator: Simulator) -> None:
    simulator.pool._stack[0] = 0


def flip_a_kept_bit(simulator: Simulator) -> None:
    leaf(simulator).head_token_sets.packed[0, 0, 0] ^= 128


def miscount_kept_bits(simulator: Simulator) -> None:
    leaf(simulator).head_token_sets.counts[-1] -= 1


def flag_settled_without_freeing(simulator: Simulator) -> None:
    leaf(simulator).head_token_sets.settled[:] = True


def free_without_flagging(simulator: Simulator) -> None:
    simulator.pool.settle(leaf(simulator).value)


def heal_what_is_settled(simulator: Simulator) -> None:
    trunk(simulator).head_token_sets.healed[0] = True


def heal_twice(simulator: Simulator) -> None:
    """The spares of the second time belong to another conversation by now."""
    simulator.allocator.queue_heal(trunk(simulator).value[:3], leaf(simulator).value[-3:])


def lock_once_too_rarely(simulator: Simulator) -> None:
    simulator.tree.dec_lock_ref(leaf(simulator))


def lock_once_too_often(simulator: Simulator) -> None:
    simulator.tree.inc_lock_ref(leaf(simulator))


def drift_evictable_cells(simulator: Simulator) -> None:
    simulator.tree.evictable_cells += 1


def forget_a_dense_node(simulator: Simulator) -> None:
    simulator.tree.dense_nodes.remove(leaf(simulator))


def remember_an_evicted_node(simulator: Simulator) -> None:
    gone = leaf(simulator)
    simulator.evict(1)
    simulator.tree.dense_nodes.add(gone)


def promise_too_much(simulator: Simulator) -> None:
    simulator.allocator.ledger.credit(1)


def promise_too_much_in_a_step(simulator: Simulator) -> None:
    """The step's report sets the ledger right again; what it had promised is not forgotten."""
    simulator.allocator.ledger.credit(1000)
    served(simulator, [90, 91], 1)


def launch_on_a_false_promise(simulator: Simulator) -> None:
    simulator.allocator.ledger.credit(10_000)
    simulator._launch = lambda *args, **kwargs: simulator.pool.pop(kwargs["slots"])  # type: ignore[method-assign]
    simulator.allocator.available_cells = lambda: 10_000  # type: ignore[method-assign]
    simulator.admit(Request(9, list(range(100, 290)), 1))
    simulator.prefill_chunk(190)


def settle_released_slots(simulator: Simulator) -> None:
    node = leaf(simulator)
    dense = node.head_token_sets.dense_tail()
    cells = node.head_token_sets.condemned(dense)
    simulator.evict(1)
    simulator.allocator.queue_settle(node.value[torch.from_numpy(dense)], cells)


class Fault(NamedTuple):
    """plant: breaks a healthy server. words: what must be said. scan: whether only a scan of the table can tell."""

    plant: Callable[[Simulator], None]
    words: str
    scan: bool = False


FAULTS = [
    Fault(free_a_cell_twice, "1 cells have more than one owner"),
    Fault(free_everything_again, "freed twice"),
    Fault(stack_a_cell_twice, "1 cells have more than one owner", scan=True),
    Fault(free_slots_twice, "[full] total="),
    Fault(lose_a_cell, "1 cells are neither free nor in the cell table"),
    Fault(lose_a_free_cell, "1 cells are neither free nor in the cell table"),
    Fault(share_a_cell, "1 cells have more than one owner"),
    Fault(keep_cells_of_a_freed_slot, "cells are in use, the tree's sets say"),
    Fault(own_the_sink, "sink cell owned 1 times", scan=True),
    Fault(free_the_sink, "sink cell owned 1 times", scan=True),
    Fault(flip_a_kept_bit, "kept bits of 1 tokens differ from the cell table", scan=True),
    Fault(miscount_kept_bits, "counts are not those of its kept bits", scan=True),
    Fault(flag_settled_without_freeing, "its sets say"),
    Fault(free_without_flagging, "its sets say"),
    Fault(heal_what_is_settled, "tokens are both settled and healed"),
    Fault(heal_twice, "its sets say", scan=True),
    Fault(lock_once_too_rarely, "has -1 locks"),
    Fault(lock_once_too_often, "has 1 locks, 0 requests hold rows"),
    Fault(drift_evictable_cells, "evictable_cells is"),
    Fault(forget_a_dense_node, "dense_nodes (2) are not the nodes"),
    Fault(remember_an_evicted_node, "dense_nodes (3) are not the nodes"),
    Fault(promise_too_much, "the ledger promised 1 cells more than were free"),
    Fault(promise_too_much_in_a_step, "cells more than were free"),
    Fault(launch_on_a_false_promise, "cells wanted"),
    Fault(settle_released_slots, "cells more than were free"),
]
BY_NAME = pytest.mark.parametrize("fault", FAULTS, ids=[fault.plant.__name__ for fault in FAULTS])


def said(fault: Fault) -> str:
    """All that production says about a fault on a server that was healthy before."""
    simulator = idle_server()
    try:
        fault.plant(simulator)
    except RuntimeError as error:  # a guard of the pool stopped it at once
        return str(error)
    return "\n".join(production_faults(simulator))


@BY_NAME
def test_a_planted_fault_is_named(fault: Fault) -> None:
    assert fault.words in said(fault)


@BY_NAME
def test_what_large_tables_still_catch(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table too large to be scanned is counted: only faults that leave every count right pass."""
    monkeypatch.setattr(allocator_module, "FULL_SCAN_ENTRIES", 0)
    assert bool(said(fault)) != fault.scan


def test_a_healthy_server_says_nothing() -> None:
    simulator = idle_server()
    assert production_faults(simulator) == []
    assert simulator.allocator._checked == simulator.allocator.ledger.launches > 0
