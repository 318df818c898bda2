"""The GPU backend, in Triton's interpreter, against the CPU backend on the same cells, step by step."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvzap_sglang.attention import device_lists
from kvzap_sglang.attention.cpu import KVPressCPUBackend
from kvzap_sglang.attention.triton import KVPressTritonBackend
from kvzap_sglang.memory.device_cell_pool import DeviceCellPool
from kvzap_sglang.step_plan import StepPlan
from tests.interpreted import INTERPRETED
from tests.memory.simulator import HEADS, LAYERS, Request, Simulator

pytestmark = INTERPRETED

DIM, GROUP = 16, 2
LAYER = SimpleNamespace(
    layer_id=LAYERS - 1, tp_q_head_num=GROUP * HEADS, tp_k_head_num=HEADS, tp_v_head_num=HEADS,
    qk_head_dim=DIM, v_head_dim=DIM, scaling=0.25,
)  # fmt: skip


class Bench:
    """A simulator whose every step attends one layer by both backends and compares.

    Attributes:
        shapes: of the steps compared: how many queries were alone, dense and sparse.
    """

    def __init__(self, *, sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_lists, "CHUNK", 16)
        self.simulator = Simulator(
            physical=200, headroom=3, window=4, lag=1, removed=0.6, sparse=sparse, pool=DeviceCellPool, seed=5,
            tokens=random.Random(5),
        )  # fmt: skip
        pool = self.simulator.pool
        pool.k, pool.v = (torch.randn(len(pool.k), DIM) for _ in range(2))
        kv = SimpleNamespace(start_layer=0)
        runner = SimpleNamespace(device="cpu", req_to_token_pool=self.simulator.rows, token_to_kv_pool=kv)
        self.triton = KVPressTritonBackend(runner, self.simulator.runtime)
        self._runner, self.shapes = runner, list[tuple[int, int, int]]()
        self.simulator.attention = self.compare

    def compare(self, plan: StepPlan) -> None:
        runtime, rows = self.simulator.runtime, self.simulator.rows.req_to_token
        slots = torch.cat([rows[row.row, row.start : row.end] for row in plan.rows]).long()
        # Rows of a fused projection, which lie apart.
        fused = torch.randn(plan.tokens, (GROUP + 2) * HEADS * DIM)
        q, k, v = fused.split([GROUP * HEADS * DIM, HEADS * DIM, HEADS * DIM], dim=1)
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False), out_cache_loc=slots)
        self.triton.init_forward_metadata(batch)
        ours = self.triton.forward(q, k, v, LAYER, batch)
        singles, dense, longer = self.triton._groups or (None, None, None)
        self.shapes.append(tuple(0 if group is None else len(group.rows) for group in (singles, dense, longer)))  # type: ignore[arg-type]
        assert runtime.step.kept is not None
        step = SimpleNamespace(kept=runtime.step.kept.bool(), write=runtime.step.write)
        view: Any = SimpleNamespace(
            cells=runtime.cells, window=runtime.window, step=step, require_plan=runtime.require_plan
        )
        cpu = KVPressCPUBackend(self._runner, view)
        cpu.init_forward_metadata(batch)
        torch.testing.assert_close(ours, cpu.forward(q, k, v, LAYER, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_equals_the_cpu_backend(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, prefix hits of every kind, decode steps, a retracted request: steps of every mix."""
    torch.manual_seed(3)
    rng, bench = random.Random(11), Bench(sparse=sparse, monkeypatch=monkeypatch)
    simulator, stem = bench.simulator, [random.Random(1).randrange(3) for _ in range(60)]
    waiting = [Request(n, [*stem[: rng.randint(20, 60)], n], 6) for n in range(6)]
    for _ in range(45):
        if simulator.chunked is None and waiting and simulator.admit(waiting[0]):
            waiting.pop(0)
        simulator.prefill_chunk(rng.choice([1, 7, 30]))
        if rng.random() < 0.6:
            simulator.decode()
        if rng.random() < 0.05 and (running := [r for r in simulator.running if r.output_ids]):
            waiting.append(simulator.retract(running[0]))
    assert simulator.check() == [] and simulator.pool.pruned_cells > 0
    alone, dense, longer = (sum(1 for shape in bench.shapes if shape[kind]) for kind in range(3))
    assert alone > 8 and (longer > 5 if sparse else dense > 5)
    assert any(shape[0] > 1 for shape in bench.shapes)
