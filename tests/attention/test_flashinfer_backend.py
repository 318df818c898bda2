"""The FlashInfer backend over stand-ins of FlashInfer's wrappers, against the CPU backend on the same cells."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvzap_sglang.attention import flashinfer as ours
from kvzap_sglang.attention.cpu import KVPressCPUBackend
from kvzap_sglang.attention.device_lists import StepGroups
from kvzap_sglang.attention.flashinfer import KVPressFlashInferBackend, flashinfer_fault
from kvzap_sglang.attention.flashinfer_wrappers import FLASHINFER_VERSION, PRIVATE, DensePrompts, Heads, head_order
from kvzap_sglang.attention.triton import KVPressTritonBackend
from kvzap_sglang.guard import GuardError
from kvzap_sglang.kernels.encoding import NONE
from kvzap_sglang.step_plan import StepPlan
from tests.attention import fake_flashinfer
from tests.attention.flashinfer_planner import Unavailable
from tests.attention.real_flashinfer import use_real_wrappers
from tests.attention.test_triton_backend import DIM, GROUP, LAYER, Bench
from tests.interpreted import INTERPRETED
from tests.memory.simulator import HEADS, LAYERS, Request

PREFIX, CHUNK = "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"
DECODE = "BatchDecodeWithPagedKVCacheWrapper"
# Stand-ins, or FlashInfer's own wrappers over its own planner, where they are installed.
BOTH = pytest.mark.parametrize("fake", ["stand-ins", "wrappers"], indirect=True)
pytestmark = INTERPRETED


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A FlashInfer of the pinned version that serves what the simulator has: fp32, small heads."""
    if getattr(request, "param", None) == "wrappers":
        try:
            use_real_wrappers(monkeypatch)
        except Unavailable as error:
            pytest.skip(str(error))
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(ours.metadata, "version", lambda name: FLASHINFER_VERSION)
    monkeypatch.setattr(ours, "DTYPES", (torch.float32,))
    monkeypatch.setattr(ours, "HEAD_DIMS", (DIM,))
    fake_flashinfer.calls.clear()
    return fake_flashinfer


class FlashInferBench(Bench):
    """Attends every layer of every step by both backends and compares."""

    def __init__(self, *, sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(sparse=sparse, monkeypatch=monkeypatch)
        heads = {"num_attention_heads": GROUP * HEADS, "get_total_num_kv_heads": lambda: HEADS}
        self._runner.model_config = SimpleNamespace(**heads, dtype=torch.float32)
        self.backend = KVPressFlashInferBackend(self._runner, self.simulator.runtime, singles=True)
        self.calls: list[list[str]] = []
        """Of FlashInfer, in each step."""
        self._stored: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))
        write = self.simulator.runtime.step.write

        def stored(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            """What is recomputed for the tree may be the tree's own: the same for both backends."""
            self._stored = write(*args)
            return self._stored

        monkeypatch.setattr(self.simulator.runtime.step, "write", stored)

    def compare(self, plan: StepPlan) -> None:
        runtime, rows = self.simulator.runtime, self.simulator.rows.req_to_token
        slots = torch.cat([rows[row.row, row.start : row.end] for row in plan.rows]).long()
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False), out_cache_loc=slots)
        assert runtime.step.kept is not None
        step = SimpleNamespace(kept=runtime.step.kept.bool(), write=lambda layer, slots, k, v: self._stored)
        view: Any = SimpleNamespace(
            cells=runtime.cells, window=runtime.window, step=step, require_plan=runtime.require_plan
        )
        cpu = KVPressCPUBackend(self._runner, view)
        fake_flashinfer.calls.clear()
        for backend in (self.backend, cpu):
            backend.init_forward_metadata(batch)
        for index in range(LAYERS):
            layer = SimpleNamespace(**{**vars(LAYER), "layer_id": index})
            fused = torch.randn(plan.tokens, (GROUP + 2) * HEADS * DIM)
            q, k, v = fused.split([GROUP * HEADS * DIM, HEADS * DIM, HEADS * DIM], dim=1)
            found = self.backend.forward(q, k, v, layer, batch)
            torch.testing.assert_close(found, cpu.forward(q, k, v, layer, batch), rtol=1e-5, atol=1e-5)
        groups = self.backend._groups or (None, None, None)
        self.shapes.append(tuple(0 if group is None else len(group.rows) for group in groups))  # type: ignore[arg-type]
        self.calls.append(list(fake_flashinfer.calls))

    def serve(self) -> None:
        """Prompts in chunks, prefix hits of every kind, decode steps, a retracted request."""
        torch.manual_seed(3)
        rng, simulator = random.Random(11), self.simulator
        stem = [random.Random(1).randrange(3) for _ in range(60)]
        waiting = [Request(n, [*stem[: rng.randint(20, 60)], n], 6) for n in range(6)]
        for _ in range(90):
            if simulator.chunked is None and waiting and simulator.admit(waiting[0]):
                waiting.pop(0)
            simulator.prefill_chunk(rng.choice([1, 7, 30]))
            if rng.random() < 0.6:
                simulator.decode()
            if rng.random() < 0.05 and (running := [r for r in simulator.running if r.output_ids]):
                waiting.append(simulator.retract(running[0]))
        assert simulator.check() == [] and simulator.pool.pruned_cells > 0


def expected_calls(names: list[str]) -> list[str]:
    """Planned once, run for every layer."""
    return [f"{name}.plan" for name in names] + [f"{name}.run" for name in names] * LAYERS


@BOTH
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_equals_the_cpu_backend(sparse: bool, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With single queries too, which Triton's interpreter would take a minute for."""
    bench = FlashInferBench(sparse=sparse, monkeypatch=monkeypatch)
    bench.serve()
    wanted = {"alone": [DECODE], "cold": [CHUNK], "hit": [CHUNK, PREFIX], "sparse": []}
    for (alone, dense, longer), calls in zip(bench.shapes, bench.calls, strict=True):
        # The simulator has one prompt in a step.
        assert (alone > 0) + dense + longer == 1
        kinds = ("alone",) if alone else ("sparse",) if longer else ("cold", "hit")
        assert any(calls == expected_calls(wanted[kind]) for kind in kinds)
    hits, alone = (bench.calls.count(expected_calls(wanted[kind])) for kind in ("hit", "alone"))
    assert alone > 15 and (hits == 0 if sparse else hits > 5)


class Mixed:
    """A step of several chunks with single queries between them, all of one row whose heads keep different cells."""

    STARTS, LENGTHS = (30, 0, 0, 12, 55, 7), (5, 1, 7, 1, 4, 9)

    def __init__(self, rng: torch.Generator, *, dtype: torch.dtype = torch.float32) -> None:
        cells = 1 + torch.randperm(LAYERS * 80 * HEADS, generator=rng).view(LAYERS, 80, HEADS)
        kept = torch.rand(LAYERS, 80, HEADS, generator=rng) < torch.tensor([0.0, 0.9, 0.3])
        pools = (torch.randn(cells.numel() + 1, DIM, generator=rng).to(dtype) for _ in range(2))
        k, v = pools
        table = torch.where(kept, cells, NONE).to(torch.int32)
        layout = SimpleNamespace(heads=HEADS)
        step = SimpleNamespace(kept=None, write=lambda layer, slots, k, v: (k, v))
        self.runtime: Any = SimpleNamespace(
            cells=SimpleNamespace(layout=layout, k=k, v=v, table=table), window=4, step=step, serving=False
        )
        rows = SimpleNamespace(req_to_token=torch.randperm(80, generator=rng)[None].to(torch.int32))
        heads = {"num_attention_heads": GROUP * HEADS, "get_total_num_kv_heads": lambda: HEADS}
        self.runner = SimpleNamespace(
            device="cpu", req_to_token_pool=rows, token_to_kv_pool=SimpleNamespace(start_layer=0),
            model_config=SimpleNamespace(**heads, dtype=dtype),
        )  # fmt: skip
        mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: False)
        self.batch = SimpleNamespace(
            forward_mode=mode, out_cache_loc=None, extend_prefix_lens_cpu=self.STARTS, extend_seq_lens_cpu=self.LENGTHS
        )
        fused = torch.randn(sum(self.LENGTHS) + 3, (GROUP + 2) * HEADS * DIM, generator=rng).to(dtype)
        self.qkv = fused.split([GROUP * HEADS * DIM, HEADS * DIM, HEADS * DIM], dim=1)

    def attend(self, backend: KVPressTritonBackend, **layer: Any) -> torch.Tensor:
        """One layer of a step whose metadata was made."""
        return backend.forward(*self.qkv, SimpleNamespace(**{**vars(LAYER), **layer}), self.batch)

    def both(
        self, *, singles: bool = True, **layer: Any
    ) -> tuple[KVPressFlashInferBackend, torch.Tensor, torch.Tensor]:
        """The backend after that step, what it gave, and what Triton gave."""
        backend = KVPressFlashInferBackend(self.runner, self.runtime, singles=singles)
        triton = KVPressTritonBackend(self.runner, self.runtime)
        fake_flashinfer.calls.clear()
        for each in (backend, triton):
            each.init_forward_metadata(self.batch)
        return backend, self.attend(backend, **layer), self.attend(triton, **layer)


@BOTH
@pytest.mark.parametrize("singles", [False, True], ids=["", "singles"])
def test_chunks_with_others_between_them(singles: bool, fake: Any, rng: torch.Generator) -> None:
    """Their tokens are gathered, and what pads the batch stays zero."""
    _, found, expected = Mixed(rng).both(singles=singles)
    planned, run = [CHUNK, PREFIX] + [DECODE] * singles, [DECODE] * singles + [CHUNK, PREFIX]
    assert fake.calls == [f"{name}.plan" for name in planned] + [f"{name}.run" for name in run]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not found[-3:].any()


@BOTH
def test_one_chunk_is_not_gathered(fake: Any, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that lie in a row are read and written where they are."""
    monkeypatch.setattr(Mixed, "STARTS", (3, 0, 60))
    monkeypatch.setattr(Mixed, "LENGTHS", (6, 2, 5))
    backend, found, expected = Mixed(rng).both()
    assert backend._prompts is not None and backend._prompts._tokens == slice(0, 13)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_step_that_was_not_planned_is_tritons(fake: Any, rng: torch.Generator) -> None:
    """As a recorded one, which may follow one that was."""
    mixed = Mixed(rng)
    backend, found, _ = mixed.both()
    again = [None if group is None else group._replace(begins=group.begins.clone()) for group in backend._groups or ()]
    fake.calls.clear()
    backend._groups = StepGroups(*again)
    torch.testing.assert_close(mixed.attend(backend), found, rtol=1e-5, atol=1e-5)
    assert fake.calls == []


def test_another_scale_is_tritons(fake: Any, rng: torch.Generator) -> None:
    _, found, expected = Mixed(rng).both(scaling=0.3)
    assert torch.equal(found, expected) and not [call for call in fake.calls if "run" in call]


@pytest.mark.parametrize("changed", ["DTYPES", "HEAD_DIMS"])
def test_what_flashinfer_cannot_serve_is_tritons(
    changed: str, fake: Any, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ours, changed, ())
    _, found, expected = Mixed(rng).both()
    assert torch.equal(found, expected) and fake.calls == [] and "Triton attends everything" in caplog.text


def test_version_and_import_are_checked(fake: Any, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flashinfer_fault() is None
    mixed = Mixed(rng)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(GuardError, match=r"--kv-press-attention flashinfer: flashinfer cannot be imported .*triton"):
        KVPressFlashInferBackend(mixed.runner, mixed.runtime)
    monkeypatch.setattr(ours.metadata, "version", lambda name: "0.7.3")
    with pytest.raises(GuardError, match=r"found 0\.7\.3: pip install flashinfer-python==0\.7\.2"):
        KVPressFlashInferBackend(mixed.runner, mixed.runtime)
    monkeypatch.undo()
    if importlib.util.find_spec("flashinfer") is None:
        assert "not installed: pip install flashinfer-python==0.7.2" in str(flashinfer_fault())


@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize("wrapper", ["BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"])
def test_a_missing_attribute_is_refused_at_the_start(
    wrapper: str, name: str, fake: Any, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed, kind = Mixed(rng), getattr(fake, wrapper)

    class Renamed(kind):  # type: ignore[misc]
        def __getattribute__(self, attribute: str) -> Any:
            if attribute == name:
                raise AttributeError(attribute)
            return super().__getattribute__(attribute)

    monkeypatch.setattr(fake, wrapper, Renamed)
    with pytest.raises(GuardError, match=f"--kv-press-attention flashinfer.*{name} of Renamed.*pip install.*triton"):
        KVPressFlashInferBackend(mixed.runner, mixed.runtime, singles=True)


def test_what_goes_wrong_in_a_first_step_is_refused(
    fake: Any, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page table that is not the one exchanged, an LSE to another base, a compiler that is not there."""
    mixed = Mixed(rng)

    def own_table(self: Any, q: Any, cache: Any, out: Any) -> torch.Tensor:
        self._paged_kv_indptr_buf = torch.cat([torch.zeros(1), self._bounds.cumsum(0)]).int()
        return attend(self, q, cache, out)

    def other_base(self: Any, q: Any, cache: Any, out: Any) -> torch.Tensor:
        return attend(self, q, cache, out) * math.log(2)

    def no_compiler(*args: Any) -> None:
        raise RuntimeError("Could not find nvcc")

    attend = fake.Paged._attend
    for change, said in ((own_table, "does not attend"), (other_base, "does not attend"), (no_compiler, "find nvcc")):
        monkeypatch.setattr(fake.Paged, "_attend", change)
        with pytest.raises(GuardError, match=f"--kv-press-attention flashinfer.*{said}.*--kv-press-attention triton"):
            KVPressFlashInferBackend(mixed.runner, mixed.runtime)


def test_head_order() -> None:
    lengths, tokens = np.array([2, 1, 3]), np.array([4, 5, 9, 0, 1, 2])
    token, head, back = head_order(lengths, tokens, 2).tolist()
    assert token == [4, 5, 4, 5, 9, 9, 0, 1, 2, 0, 1, 2]
    assert head == [0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1]
    assert [(token[row], head[row]) for row in back] == [(t, h) for t in tokens.tolist() for h in range(2)]


@pytest.mark.parametrize(("query", "dim", "rows"), [(32, 128, 32), (64, 128, 64), (96, 128, 12), (128, 64, 128)])
def test_merged_rows_fit_a_block(query: int, dim: int, rows: int, fake: Any) -> None:
    prompts = DensePrompts(fake, Heads(8, query // 8, dim, torch.bfloat16), torch.device("cpu"))
    out, lse = prompts._mergeable(torch.zeros(5, query, dim, dtype=torch.bfloat16), torch.zeros(5, query))
    assert out.shape == (5 * query // rows, rows, dim) and lse.shape == out.shape[:2]
