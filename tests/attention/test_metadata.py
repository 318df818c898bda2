"""What attention reads is fixed when a step's metadata is made; rows that only pad a batch are nobody's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvzap_sglang.attention.cpu import KVPressCPUBackend
from kvzap_sglang.kernels.encoding import NONE
from kvzap_sglang.presses.base import LayerInput
from kvzap_sglang.step_plan import RowPlan, StepPlan
from tests.memory.simulator import HEADS, LAYERS, Request, Simulator

DIM = 16
NO_REUSE = torch.empty(0, dtype=torch.int64)


class Bench:
    """The CPU backend over a simulator's memory: keys and values of every cell are random, nothing is condemned."""

    def __init__(self, removed: float = 0.0) -> None:
        torch.manual_seed(3)
        self.simulator = Simulator(physical=400, headroom=2, window=4, lag=0, removed=removed, sparse=False)
        pool = self.simulator.pool
        pool.k, pool.v = (torch.randn(len(pool.k), DIM) for _ in range(2))
        self.rows, self.runtime = self.simulator.rows, self.simulator.runtime
        kv = SimpleNamespace(start_layer=0)
        runner = SimpleNamespace(device="cpu", req_to_token_pool=self.rows, token_to_kv_pool=kv)
        self.backend = KVPressCPUBackend(runner, self.runtime)
        self.layer = SimpleNamespace(
            layer_id=1, tp_q_head_num=2 * HEADS, tp_k_head_num=HEADS, tp_v_head_num=HEADS,
            qk_head_dim=DIM, v_head_dim=DIM, scaling=0.25,
        )  # fmt: skip
        for number in range(3):
            request = Request(number, list(range(100 * number, 100 * number + 20 + 7 * number)), 9)
            assert self.simulator.admit(request) and self.simulator.prefill_chunk(99)

    def decode_plan(self, rows: list[int]) -> StepPlan:
        """A decode step of these rows, as the scheduler plans it."""
        plan = StepPlan(99, is_decode=True)
        for row in rows:
            length = self.simulator.tree.rows[row].launched
            plan.rows.append(
                RowPlan(row, length - 1, length, 0, length, 0, 0.0, NO_REUSE, self.simulator.tree.rows[row])
            )
        return plan

    def metadata(self, rows: list[int]) -> int:
        """Make a step's metadata. Returns its number of tokens."""
        self.runtime.plan = self.decode_plan(rows)
        self.backend.init_forward_metadata(None)
        return len(rows)

    def attend(self, tokens: int, of: tuple[int, int] | None = None) -> torch.Tensor:
        """One layer's attention of a step. of: (index, n), this step's one token is one of another step of n."""
        index, n = of or (0, tokens)
        torch.manual_seed(5)
        q, k, v = (torch.randn(n, heads * DIM)[index : index + tokens] for heads in (2 * HEADS, HEADS, HEADS))
        sink = torch.zeros(tokens, dtype=torch.int64)
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False), out_cache_loc=sink)
        return self.backend.forward(q, k, v, self.layer, batch)


def test_metadata_is_a_snapshot() -> None:
    """The scheduler goes on while a step waits: rows, lengths and windows that it changes are those of later steps."""
    bench = Bench()
    rows = sorted(bench.simulator.tree.rows)
    tokens = bench.metadata(rows)
    expected = bench.attend(tokens)
    plan = bench.runtime.plan
    bench.rows.req_to_token[1:] = bench.rows.req_to_token[1:].flip(1)
    for row in bench.simulator.tree.rows.values():
        row.launched += 3
        row.reach += 3
    assert plan is not None
    plan.rows.clear()
    assert torch.equal(bench.attend(tokens), expected)


def test_new_metadata_follows_what_changed() -> None:
    """No list of an earlier step is used again: the same buffers, changed in place, give the next step's result."""
    bench = Bench()
    rows = sorted(bench.simulator.tree.rows)
    first = bench.attend(bench.metadata(rows))
    bench.rows.req_to_token[rows[0]] = bench.rows.req_to_token[rows[1]]
    second = bench.attend(bench.metadata(rows))
    assert torch.equal(first[1:], second[1:]) and not torch.equal(first[0], second[0])


def test_no_buffer_is_sized_for_a_largest_batch() -> None:
    """Every batch of a growing series gets what each of its requests gets alone."""
    bench = Bench()
    row = sorted(bench.simulator.tree.rows)[2]
    for requests in (1, 2, 33, 400):
        together = bench.attend(bench.metadata([row] * requests))
        for index in {0, requests // 2, requests - 1}:
            torch.testing.assert_close(bench.attend(bench.metadata([row]), of=(index, requests)), together[[index]])


def test_a_head_of_which_nothing_is_left() -> None:
    """Attention over no cell is 0, beside heads that see something."""
    bench = Bench()
    rows = sorted(bench.simulator.tree.rows)
    slots = bench.rows.req_to_token[rows[0], : bench.simulator.tree.rows[rows[0]].launched].long()
    bench.simulator.pool.table[1, slots, 1] = NONE
    out = bench.attend(bench.metadata(rows)).view(3, HEADS, 2, DIM)
    assert not out[0, 1].any() and torch.isfinite(out).all()
    assert out[0, [0, 2]].any() and out[1:].flatten(1).any(dim=1).all()


def test_a_step_of_no_token() -> None:
    """Planned, begun, scored, attended and ended without a token: nothing moves."""
    bench = Bench(removed=0.5)
    simulator, empty = bench.simulator, torch.empty(0, dtype=torch.int64)
    before = simulator.pool.table.clone()
    mode = SimpleNamespace(is_decode=lambda: True)
    plan = bench.runtime.launch(SimpleNamespace(reqs=[], forward_mode=mode, seq_lens_cpu=empty))
    assert (plan.tokens, plan.rows, plan.settle) == (0, [], [])
    bench.runtime.begin(empty)
    bench.backend.init_forward_metadata(None)
    for layer in range(LAYERS):
        bench.runtime.step.score(layer, LayerInput(empty, empty, empty))
    assert bench.attend(0).shape == (0, 2 * HEADS * DIM)
    bench.runtime.apply(bench.runtime.end())
    assert torch.equal(simulator.pool.table, before) and simulator.allocator.ledger.idle
    assert simulator.check() == []


class Recording:
    """Scores 0 for everything, and remembers how many tokens it was shown."""

    digest = "recording"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def score(self, layer: int, inputs: LayerInput) -> torch.Tensor:
        self.seen.append(len(inputs.hidden))
        return torch.zeros(len(inputs.hidden), HEADS)


@pytest.mark.parametrize("padding", [0, 1, 5])
def test_padded_rows_are_neither_scored_nor_given_cells(padding: int) -> None:
    """A padded batch carries slot 0 and garbage (here NaN) in its last rows: only the sink cell may take them."""
    bench = Bench()
    press: Any = Recording()
    simulator, bench.runtime.step.press = bench.simulator, press
    rows = sorted(simulator.tree.rows)
    slots = simulator.allocator.alloc(len(rows))
    free = simulator.pool.free_cells
    bench.runtime.plan = bench.decode_plan(rows)
    loc = torch.cat([slots, torch.zeros(padding, dtype=torch.int64)])
    bench.runtime.begin(loc)
    hidden = torch.full((len(loc), 8), float("nan"))
    hidden[: len(rows)] = 1.0
    for layer in range(LAYERS):
        bench.runtime.step.score(layer, LayerInput(hidden, loc, loc))
    decisions = bench.runtime.end()
    assert press.seen == [len(rows)] * LAYERS
    assert len(decisions.packed()) == len(rows)
    assert free - simulator.pool.free_cells == len(rows) * simulator.pool.layout.cells_per_token
    assert (simulator.pool.table[:, 0] == 0).all() and simulator.pool.check() == []
