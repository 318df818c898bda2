"""Shared pruned prefixes: a sparse hit equals a cold run, and a branch heals what it recomputes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from tests.compare import assert_same_generation
from tests.servers import Server, model_path, serve
from tests.surrogates import make_surrogate
from tests.workloads import tokens

pytestmark = pytest.mark.server

TINY, LAYERS, WINDOW = "tiny-llama-random", 2, 32
WORKLOADS = 40


class Shape(NamedTuple):
    """How a server runs; none of it may show in an answer. room: dense tokens, few of them force reclaims."""

    chunk: int
    overlap: bool
    room: int = 30000


SHAPES = (Shape(64, True), Shape(256, False), Shape(2048, True), Shape(64, True, room=1200))


def start(folder: Any, prefill: str, shape: Shape) -> Any:
    """A server whose surrogate condemns about half of all pairs."""
    make_surrogate(folder / "surrogate", hidden=64, layers=LAYERS, kv_heads=2)
    flags = ["--dtype", "float32", "--max-running-requests", "8", "--max-total-tokens", str(shape.room)]
    flags += ["--chunked-prefill-size", str(shape.chunk), *([] if shape.overlap else ["--disable-overlap-schedule"])]
    flags += ["--kv-press", "kvzap", "--kv-press-model", str(folder / "surrogate"), "--kv-press-threshold", "0"]
    flags += ["--kv-press-window", str(WINDOW), "--kv-press-prefill", prefill]
    return serve(model_path(TINY), folder / "server.log", *flags)


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start(tmp_path_factory.mktemp("sparse"), "sparse", request.param) as server:
        yield server


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start(tmp_path_factory.mktemp("dense"), "dense", SHAPES[0]) as server:
        yield server


def cold(server: Server, prompt: list[int], new: int) -> dict[str, Any]:
    """The same request where nothing is shared."""
    answer = server.generate(prompt, new, logprob=True, extra_key=uuid4().hex)
    assert answer["meta_info"]["cached_tokens"] == 0
    return answer


def branches(rng: random.Random, held: list[int]) -> list[list[int]]:
    """Continuations of a finished request's tokens: at the exact end, inside, within a window of the end."""
    ends = [len(held), rng.randrange(1, len(held)), len(held) - rng.randrange(1, WINDOW)]
    ends.append(ends[1])  # and where another branch was a moment ago
    return [held[:end] + tokens(rng, rng.randint(1, 60)) for end in ends]


def test_a_hit_equals_a_cold_run(sparse: Server) -> None:
    rng = random.Random(5)
    compared = reused = 0
    for _ in range(WORKLOADS // 2):
        # Two workloads at a time: the batch's composition must not show.
        prompts = [tokens(rng, rng.randint(40, 300)) for _ in range(2)]
        new = rng.randint(1, 60)
        firsts = sparse.generate_all([{"input_ids": p, "max_new_tokens": new} for p in prompts])
        held = [p + a["output_ids"][:-1] for p, a in zip(prompts, firsts, strict=True)]
        wave = [branch for tokens_held in held for branch in branches(rng, tokens_held)]
        rng.shuffle(wave)
        hits = sparse.generate_all([{"input_ids": p, "max_new_tokens": 8, "logprob": True} for p in wave])
        for prompt, hit in zip(wave, hits, strict=True):
            compared += assert_same_generation(cold(sparse, prompt, 8), hit, tolerance=1e-4)
            reused += hit["meta_info"]["cached_tokens"]
    info = sparse.wait_idle()
    assert compared > 1000 and reused > 5000
    assert info["healed_cells_total"] > 0 and info["pruned_cells_total"] > 10_000
    assert (info["reclaimed_cells_total"] == 0) == (info["physical_tokens"] > 10_000)


def check_branches(server: Server, depth: int) -> None:
    """Three requests branch at one settled point: the first recomputes `depth` tokens, the others none, and what
    the first sees of its window is what the others see."""
    rng = random.Random(9)
    stem, point = tokens(rng, 300), 200
    prompts = [stem[:point] + tokens(rng, 50) for _ in range(3)]
    rounds = []
    for order in (prompts, prompts[::-1]):
        server.flush()
        before = server.wait_idle()
        server.generate(stem, 8)
        answers = [server.generate(prompt, 12, logprob=True) for prompt in order]
        assert [a["meta_info"]["cached_tokens"] for a in answers] == [point - depth, point, point]
        info = server.wait_idle()
        assert info["recomputed_tokens_total"] - before["recomputed_tokens_total"] == depth
        healed = info["healed_cells_total"] - before["healed_cells_total"]
        assert 0 < healed < WINDOW * LAYERS * 2
        rounds.append(answers)
    for one, other in zip(rounds[0], rounds[1][::-1], strict=True):
        assert_same_generation(one, other, tolerance=1e-4)


def test_requests_share_only_with_their_like(dense: Server) -> None:
    """Of the server's threshold, of their own, and unpruned: mixed in one batch, each as if alone."""
    dense.flush()
    rng = random.Random(31)
    stem = tokens(rng, 200)
    settings = [None, {"threshold": 0}, "off", {"threshold": -1000}, {"threshold": 0.5}]
    calls = [{"input_ids": stem, "max_new_tokens": 40, "custom": custom, "logprob": True} for custom in settings]
    solo = [dense.generate(**call, extra_key=uuid4().hex) for call in calls]
    # Without the second: it is of the first one's class, and in a dense prefill a hit is no cold run.
    different = [0, 2, 3, 4]
    mixed = dense.generate_all([calls[i] | {"extra_key": "tenant"} for i in different])
    for i, answer in zip(different, mixed, strict=True):
        assert_same_generation(solo[i], answer, tolerance=1e-4)
    kept = [answer["meta_info"]["kv_press"]["kept_fraction"] for answer in solo]
    assert kept[0] == kept[1] and kept[2] == kept[3] == 1.0 and kept[4] < kept[0] < 1.0
    assert solo[2]["output_ids"] == solo[3]["output_ids"]
    # One after the other: only what has the same effective threshold is found, whatever it was called.
    dense.flush()
    whole, healing = (
        len(stem) - 1,
        len(stem) - 1 - WINDOW,
    )  # the second of a class finds its window pruned, and heals it
    for call, expected in zip(calls, (0, healing, 0, 0, 0), strict=True):
        assert dense.generate(**call)["meta_info"]["cached_tokens"] == expected
    again = [dense.generate(**call)["meta_info"]["cached_tokens"] for call in calls]
    assert again == [whole, whole, whole, whole, healing]
    assert dense.generate(stem, 1, extra_key="another tenant")["meta_info"]["cached_tokens"] == 0
    dense.wait_idle()


def test_dense_branches_recompute_one_window_once(dense: Server) -> None:
    check_branches(dense, WINDOW)


def test_sparse_branches_recompute_a_window_per_layer_once(sparse: Server) -> None:
    check_branches(sparse, LAYERS * WINDOW)


def test_sparse_branches_that_come_at_once_recompute_one_after_the_other(sparse: Server) -> None:
    """One of them computes the pruned windows, the others wait for it; each answers as if alone."""
    sparse.flush()
    rng = random.Random(17)
    stem, point = tokens(rng, 300), 200
    prompts = [[*stem[:point], 100 + index, *tokens(rng, 50)] for index in range(8)]
    alone = [cold(sparse, prompt, 12) for prompt in prompts]
    before = sparse.wait_idle()
    sparse.generate(stem, 8)
    answers = sparse.generate_all([{"input_ids": p, "max_new_tokens": 12, "logprob": True} for p in prompts])
    info = sparse.wait_idle()
    assert sorted(a["meta_info"]["cached_tokens"] for a in answers) == [point - LAYERS * WINDOW] + 7 * [point]
    assert info["recomputed_tokens_total"] - before["recomputed_tokens_total"] == LAYERS * WINDOW
    for one, other in zip(alone, answers, strict=True):
        assert_same_generation(one, other, tolerance=1e-4)
