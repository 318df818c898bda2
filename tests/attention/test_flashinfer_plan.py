"""What FlashInfer plans once per step holds for every layer: its own planner, run here, and its kernel's addressing.

No GPU, and no kernel of FlashInfer's, is involved: what is shown is who reads and writes what.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
import torch

from kvzap_sglang.attention.flashinfer_wrappers import FLOAT_BYTES, PRIVATE, plan_bytes
from tests.attention import fake_flashinfer
from tests.attention.flashinfer_kernel import Tables, run
from tests.attention.flashinfer_planner import Schedule, Unavailable, library, plan, python_source

DIM = 64
GRAPH = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


@pytest.fixture(scope="module", autouse=True)
def planner() -> None:
    try:
        library()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def rng() -> torch.Generator:
    seed = int(torch.randint(1 << 31, ()))
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def tables(lengths: torch.Tensor, rng: torch.Generator) -> Tables:
    cells = 50 + int(lengths.sum())
    pools = (torch.randn(cells, DIM, generator=rng) for _ in range(2))
    return Tables([0, *lengths.cumsum(0).tolist()], torch.randperm(cells, generator=rng), *pools)


def assert_attends(
    schedule: Schedule, q_lengths: torch.Tensor, lengths: torch.Tensor, group: int, rng: torch.Generator
) -> None:
    """Every row of the output is written, and is the attention over the whole list."""
    found = tables(lengths, rng)
    q = torch.randn(int(q_lengths.sum()), group, DIM, generator=rng)
    request = torch.arange(len(lengths)).repeat_interleave(q_lengths).tolist()
    exact = [found.attended(queries, r, 0, found.length(r)) for r, queries in zip(request, q, strict=True)]
    for ours, theirs in zip(run(schedule, q, q_lengths, found), zip(*exact, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs), rtol=1e-4, atol=1e-5)


def shorter(bounds: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Lengths of a layer: some nothing, some one, some all, the others anything."""
    lengths = (bounds * torch.rand(len(bounds), generator=rng)).long()
    kind = torch.randint(6, (len(bounds),), generator=rng)
    return torch.where(kind == 0, 0, torch.where(kind == 1, 1, torch.where(kind == 2, bounds, lengths)))


@GRAPH
@pytest.mark.parametrize("multiprocessors", [8, 132])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 16])
def test_single_queries_may_have_shorter_lists_than_planned(
    group: int, multiprocessors: int, graph: bool, rng: torch.Generator
) -> None:
    """With more requests than CTAs, too, when lists are not split."""
    bounds, ones = torch.randint(1, 2100, (24,), generator=rng), torch.ones(24, dtype=torch.int64)
    bounds[:2] = torch.tensor([1, 2100])
    schedule = plan(ones, bounds, group, DIM, graph=graph, multiprocessors=multiprocessors, float_bytes=FLOAT_BYTES)
    split = schedule.merge_indptr is not None and int(schedule.merge_indptr[-1]) > 24
    assert split == (multiprocessors == 132)
    for lengths in (bounds, 0 * bounds, ones, shorter(bounds, rng), shorter(bounds, rng)):
        assert_attends(schedule, ones, lengths.clamp(max=bounds), group, rng)


def test_single_queries_may_not_have_longer_ones(rng: torch.Generator) -> None:
    """The emulation would notice."""
    bounds, ones = torch.full((24,), 700), torch.ones(24, dtype=torch.int64)
    with pytest.raises(AssertionError, match="not close"):
        assert_attends(plan(ones, bounds, 4, DIM), ones, bounds + 300, 4, rng)


Q_LENGTHS = pytest.mark.parametrize(
    "q_lengths",
    [[2, 3], [2, 31, 33, 3, 64, 65], [200, 2, 7], [4] * 300],
    ids=["few", "around a tile", "uneven", "more than CTAs"],
)


@Q_LENGTHS
@pytest.mark.parametrize("group", [1, 4, 7])
def test_an_unsplit_plan_depends_on_queries_only(q_lengths: list[int], group: int, rng: torch.Generator) -> None:
    """Bit by bit; so one plan is right for the lists of every layer, whatever was said of them."""
    queries = torch.tensor(q_lengths)
    told = [torch.randint(0, 5000, (len(queries),), generator=rng) for _ in range(3)] + [0 * queries]
    plans = [plan(queries, lengths, group, DIM, disable_split_kv=True, float_bytes=0) for lengths in told]
    for other in plans[1:]:
        assert other.info == plans[0].info and torch.equal(other.workspace, plans[0].workspace)
    lengths = shorter(torch.randint(1, 90, (len(queries),), generator=rng), rng)
    assert_attends(plans[0], queries, lengths, group, rng)
    assert_attends(plans[0], queries, 0 * lengths, group, rng)


def test_a_split_plan_of_prompts_depends_on_lists(rng: torch.Generator) -> None:
    """Why prompts are planned unsplit: parts of several queries lie where the runs' lengths say."""
    queries = torch.full((6,), 40)
    bounds = torch.full((6,), 1000)
    schedule = plan(queries, bounds, 4, DIM)
    assert schedule.merge_indptr is not None
    assert_attends(schedule, queries, bounds, 4, rng)
    with pytest.raises(AssertionError):
        assert_attends(schedule, queries, bounds // 3, 4, rng)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("disable_split_kv", [False, True])
def test_the_workspace_suffices(group: int, disable_split_kv: bool, rng: torch.Generator) -> None:
    """And the planner says so when one does not."""
    heads = 8
    for _ in range(20):
        requests = int(torch.randint(1, 40, (), generator=rng))
        most = 2 if not disable_split_kv else int(torch.randint(2, 3000, (), generator=rng))
        lengths = torch.randint(1, most, (requests,), generator=rng)
        room = plan_bytes(int(lengths.sum()), heads * group, requests)
        flat = lengths.repeat_interleave(heads)
        bounds = torch.randint(0, 9000, (requests * heads,), generator=rng)
        plan(flat, bounds, group, DIM, disable_split_kv=disable_split_kv, int_bytes=room, float_bytes=FLOAT_BYTES)
    with pytest.raises(ValueError, match=r"[Bb]uffer"):
        plan(flat, bounds, group, DIM, disable_split_kv=disable_split_kv, int_bytes=64)


def methods(module: str, name: str) -> dict[str, ast.FunctionDef]:
    """The methods of a class of FlashInfer's; of an overloaded one, what is called."""
    (found,) = (
        node for node in ast.parse(python_source(module)).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def names(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


@pytest.mark.parametrize(
    ("module", "wrapper"),
    [
        ("prefill.py", fake_flashinfer.BatchPrefillWithRaggedKVCacheWrapper),
        ("prefill.py", fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper),
        ("decode.py", fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper),
    ],
)
def test_the_wrappers_take_what_they_are_given(module: str, wrapper: Any) -> None:
    """By the interface of the stand-ins, which the backend is tested with: positions, names, page tables."""
    real = methods(module, wrapper.__name__)
    real["plan"] = real.get("_plan_impl", real["plan"])
    for method in ("plan", "run", "reset_workspace_buffer"):
        wanted, taken = list(inspect.signature(getattr(wrapper, method)).parameters.values()), names(real[method])
        positional = [parameter.name for parameter in wanted if parameter.kind != parameter.KEYWORD_ONLY]
        assert {parameter.name for parameter in wanted if parameter.name not in positional} <= set(
            taken[len(positional) :]
        )
        # What `run` is given has other names there, but the same places.
        assert method == "run" or method.startswith("reset") or taken[: len(positional)] == positional
    assert names(real["__init__"])[:3] == ["self", "float_workspace_buffer", "kv_layout"]
    assert {"backend"} | ({"use_tensor_cores"} if module == "decode.py" else set()) <= set(names(real["__init__"]))
    if wrapper is not fake_flashinfer.BatchPrefillWithRaggedKVCacheWrapper:
        for method, context in (("plan", ast.Store), ("run", ast.Load)):
            used = (node for node in ast.walk(real[method]) if isinstance(node, ast.Attribute))
            assert set(PRIVATE) <= {node.attr for node in used if isinstance(node.ctx, context)}


def test_the_merge_takes_what_it_is_given() -> None:
    merge = inspect.signature(fake_flashinfer.merge_state_in_place).parameters
    (real,) = (
        node
        for node in ast.parse(python_source("cascade.py")).body
        if isinstance(node, ast.FunctionDef) and node.name == "merge_state_in_place"
    )
    assert names(real)[: len(merge)] == list(merge)
    assert "merge_state_in_place as merge_state_in_place" in python_source("__init__.py")
