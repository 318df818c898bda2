"""A decode step as a CUDA graph would hold it: nothing read back, no shape that depends on data, padded batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

from kvzap_sglang.attention import device_lists
from kvzap_sglang.attention.triton import KVPressTritonBackend
from kvzap_sglang.memory.device_cell_pool import DeviceCellPool
from kvzap_sglang.presses.base import LayerInput
from kvzap_sglang.presses.kvzap import KVzapPress
from kvzap_sglang.presses.surrogate import load_surrogate
from tests.interpreted import INTERPRETED
from tests.memory.simulator import HEADS, LAYERS, Request, Simulator
from tests.surrogates import make_surrogate

pytestmark = INTERPRETED

DIM, GROUP, HIDDEN, MOST, CONTEXT = 16, 2, 24, 6, 512
# What waits for the device, or makes a tensor as large as its contents say.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "equal", "repeat_interleave.Tensor")
METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "pin_memory")


class WavePress:
    """Scores by position, the same whenever asked."""

    digest = "wave"

    def score(self, layer: int, inputs: LayerInput) -> torch.Tensor:
        return torch.sin(inputs.positions[:, None] * (layer + 1.3) + torch.arange(HEADS)).float()


class Recorder(TorchDispatchMode):
    """Writes down every operation with the shapes that go in and come out; refuses what a graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(word in name for word in WAITS), f"{name} cannot be recorded"
        picks = args[1] if "aten.index" in name and isinstance(args[1], list | tuple) else ()
        assert not any(pick is not None and pick.dtype == torch.bool for pick in picks), f"{name} by a mask"
        out = func(*args, **(kwargs or {}))
        self.log.append((name, shapes(args), shapes([out])))
        return out


def shapes(values: Any) -> list[Any]:
    return [(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else type(v).__name__ for v in values]


@contextmanager
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Kernels are not run, only their launches written down: grids, shapes and numbers."""
    recorder = Recorder()

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        def record(*args: Any, **kwargs: Any) -> None:
            told = [shapes([v])[0] if isinstance(v, torch.Tensor) else v for v in (*args, *kwargs.values())]
            recorder.log.append((kernel.fn.__name__, grid, told))

        return record

    def refused(*args: Any) -> Any:
        raise AssertionError("a recorded step reads a tensor on the host")

    with monkeypatch.context() as patch, recorder:
        patch.setattr(KernelInterface, "__getitem__", launch)
        for method in METHODS:
            patch.setattr(torch.Tensor, method, refused)
        yield recorder


class Bench:
    """Requests that were prefilled and pruned, and the backend with a graph's buffers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_lists, "CHUNK", 16)
        monkeypatch.setattr("kvzap_sglang.attention.triton.CHUNK", 16)
        torch.manual_seed(3)
        self.simulator = Simulator(
            physical=300, headroom=3, window=4, lag=0, removed=0.6, sparse=False, pool=DeviceCellPool, seed=5,
            tokens=random.Random(5),
        )  # fmt: skip
        pool = self.simulator.pool
        pool.k, pool.v = (torch.randn(len(pool.k), DIM) for _ in range(2))
        self.runtime = self.simulator.runtime
        self.runtime.step.press = WavePress()
        for number in range(3):
            request = Request(number, list(range(100 * number, 100 * number + 20 + 17 * number)), 9)
            assert self.simulator.admit(request) and self.simulator.prefill_chunk(99)
        kv = SimpleNamespace(start_layer=0)
        runner = SimpleNamespace(device="cpu", req_to_token_pool=self.simulator.rows, token_to_kv_pool=kv)
        self.backend = KVPressTritonBackend(runner, self.runtime)
        self.backend.init_cuda_graph_state(MOST, MOST)
        # The graph's own buffers: refilled before each replay.
        self.batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_idle=lambda: False, is_decode=lambda: True),
            req_pool_indices=torch.zeros(MOST, dtype=torch.int64),
            seq_lens=torch.ones(MOST, dtype=torch.int64),
            out_cache_loc=torch.zeros(MOST, dtype=torch.int64),
            batch_size=MOST,
        )
        self.hidden = torch.randn(MOST, HIDDEN)
        self.rows_of = [torch.randn(MOST, heads * DIM) for heads in (GROUP * HEADS, HEADS, HEADS)]

    def step(self) -> list[torch.Tensor]:
        """What is recorded: metadata, then scorer and attention of every layer."""
        self.backend.init_forward_metadata_in_graph(self.batch)
        positions = self.batch.seq_lens - 1
        outputs = []
        for layer in range(LAYERS):
            self.runtime.step.score(layer, LayerInput(self.hidden, positions, positions))
            outputs.append(self.backend.forward(*self.rows_of, layer_of(layer), self.batch))
        return outputs

    def load(self, rows: list[int], lengths: list[int], slots: list[int]) -> None:
        """Fill the buffers for a batch; the rest is padding."""
        self.batch.req_pool_indices.zero_()
        self.batch.out_cache_loc.zero_()
        self.batch.seq_lens.fill_(self.backend.get_cuda_graph_seq_len_fill_value())
        for buffer, values in (("req_pool_indices", rows), ("seq_lens", lengths), ("out_cache_loc", slots)):
            getattr(self.batch, buffer)[: len(values)] = torch.tensor(values)


def layer_of(index: int) -> Any:
    return SimpleNamespace(
        layer_id=index, tp_q_head_num=GROUP * HEADS, tp_k_head_num=HEADS, tp_v_head_num=HEADS,
        qk_head_dim=DIM, v_head_dim=DIM, scaling=0.25,
    )  # fmt: skip


def test_what_is_recorded_depends_on_no_data(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches of other lengths, slots and thresholds: the same operations, shapes, grids and numbers."""
    bench, logs = Bench(monkeypatch), []
    folder = make_surrogate(tmp_path / "s", hidden=HIDDEN, layers=LAYERS, kv_heads=HEADS, hidden_dim=32)
    bench.runtime.step.press = KVzapPress(load_surrogate(str(folder), dtype=torch.float32, device="cpu"))
    bench.backend.init_forward_metadata_out_graph(bench.batch, in_capture=True)
    for rows, lengths in (([], []), ([1, 2, 3], [21, 38, 55])):
        bench.load(rows, lengths, rows)
        bench.runtime.step._fixed.limits.fill_(-1.0 * len(rows))  # type: ignore[union-attr]
        with recording(monkeypatch) as recorder:
            bench.step()
        logs.append(recorder.log)
    assert logs[0] == logs[1]
    launches = [entry[0] for entry in logs[0] if str(entry[0]).startswith("_")]
    per_layer = ["_score_kernel", "_write_kernel", "_visible_kernel", "_chunk_kernel", "_merge_kernel"]
    assert launches == ["_place_kernel", *per_layer * LAYERS]


def test_the_recorder_refuses_what_a_graph_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.tensor([True, False])
    for read in (lambda: mask.sum().item(), lambda: mask.nonzero(), lambda: torch.ones(2)[mask], lambda: mask.tolist()):
        with pytest.raises(AssertionError), recording(monkeypatch):
            read()


def test_a_replayed_step_equals_an_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real rows among padding, through the graph's buffers, against the same step from its plan."""
    bench = Bench(monkeypatch)
    simulator, compared = bench.simulator, []

    def compare(plan: Any) -> None:
        step: Any = bench.runtime.step
        rows, lengths = [row.row for row in plan.rows], [row.end for row in plan.rows]
        slots = [int(simulator.rows.req_to_token[row, length - 1]) for row, length in zip(rows, lengths, strict=True)]
        bench.load(rows, lengths, slots)
        bench.backend.init_forward_metadata_out_graph(bench.batch)
        replayed, kept = bench.step(), step.kept.clone()
        n = len(rows)
        mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: True)
        batch = SimpleNamespace(forward_mode=mode, out_cache_loc=torch.tensor(slots))
        bench.backend.init_forward_metadata(batch)
        for layer in range(LAYERS):
            own = [rows_of[:n] for rows_of in bench.rows_of]
            eager = bench.backend.forward(*own, layer_of(layer), batch)
            torch.testing.assert_close(replayed[layer][:n], eager, rtol=1e-6, atol=1e-6)
        assert torch.equal(step.kept, kept) and (simulator.pool.table[:, 0] == 0).all()
        compared.append(n)

    simulator.attention = compare
    for _ in range(6):
        assert simulator.decode()
    assert compared == [3] * 6 and simulator.check() == []


def test_a_batch_whose_lists_do_not_fit_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that share a long prefix may together be longer than all token slots."""
    bench = Bench(monkeypatch)
    slots, chunks = bench.simulator.pool.layout.virtual_tokens, bench.backend._graph.chunks  # type: ignore[union-attr]
    assert chunks == min(MOST * CONTEXT // 16, slots // 16 + MOST)
    fitting = SimpleNamespace(seq_lens_cpu=torch.tensor([16 * (chunks - 1), 1]))
    assert bench.backend.fits_graph(fitting)
    assert not bench.backend.fits_graph(SimpleNamespace(seq_lens_cpu=torch.tensor([16 * (chunks - 1), 17])))
