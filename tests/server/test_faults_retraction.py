"""Forced retraction with a tree: every third step a running request loses all it has."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compare import assert_same_generation
from tests.server.conftest import CHUNK, WINDOW
from tests.servers import Server, model_path, serve
from tests.streams import Call
from tests.surrogates import tiny_press
from tests.workloads import tokens

pytestmark = pytest.mark.server


@pytest.fixture(scope="module", params=["dense", "sparse"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One request alone is never retracted there (SGLang always leaves one running)."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    flags = ("--dtype", "float32", "--chunked-prefill-size", str(CHUNK), "--max-running-requests", "6")
    flags += ("--max-total-tokens", "1200", "--kv-press-prefill", request.param, *tiny_press(folder / "s"))
    env = {"SGLANG_TEST_RETRACT": "1"}
    with serve(model_path("tiny-llama-random"), folder / "server.log", *flags, env=env) as started:
        yield started
        info = started.wait_idle()
        started.flush()
        assert started.press_info()["cells_free"] == info["cells_total"]


@pytest.mark.parametrize(
    ("shortest", "longest", "new_tokens"),
    [(1, 14, WINDOW - 14), (1, 60, 1), (1, 60, 2)],
    ids=["within the window", "one token", "two tokens"],
)
def test_answers_are_those_of_single_requests(
    server: Server, shortest: int, longest: int, new_tokens: int, request: pytest.FixtureRequest
) -> None:
    """While nothing has left the window, and where there is nothing to recompute.

    Dense: a prompt that was retracted with a decode step under way comes back as a cached prefix, seen pruned
    (docs/sharing.md, "What equals what"), so only the others are compared.
    """
    rng = random.Random(longest + new_tokens)
    calls = [
        {"input_ids": tokens(rng, rng.randint(shortest, longest)), "max_new_tokens": new_tokens, "logprob": True}
        for _ in range(12)
    ]
    alone = [server.generate(**call) for call in calls]
    server.flush()
    together = server.generate_all(calls, workers=12)
    pruned_before = request.node.callspec.params["server"] == "dense" and longest + new_tokens > WINDOW
    pairs = list(zip(alone, together, strict=True))
    if pruned_before:
        pairs = [pair for pair in pairs if not pair[1]["meta_info"]["num_retractions"]]
    assert len(pairs) > 6
    for expected, answer in pairs:
        assert_same_generation(expected, answer, tolerance=2e-3)
    if new_tokens > 2:
        assert sum(answer["meta_info"]["num_retractions"] for answer in together) > 0
    server.wait_idle()


def test_long_answers_end(server: Server) -> None:
    """Past the window, on prompts of several chunks that share their start."""
    rng = random.Random(4)
    stem = tokens(rng, 90)
    prompts = [stem[: rng.randrange(90)] + tokens(rng, rng.choice([1, 40, 130])) for _ in range(10)]
    answers = server.generate_all([{"input_ids": p, "max_new_tokens": 2 * WINDOW} for p in prompts], workers=10)
    assert [len(answer["output_ids"]) for answer in answers] == [2 * WINDOW] * 10
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 5
    server.wait_idle()


def test_aborts_between_retractions(server: Server) -> None:
    """Requests that are ended while they wait to be computed again, or just were."""
    rng = random.Random(5)
    calls = [Call(server, tokens(rng, rng.choice([20, 100])), 300) for _ in range(10)]
    for index, call in enumerate(calls):
        time.sleep(rng.uniform(0.0, 0.2))
        if index % 2:
            call.leave()
        else:
            assert call.abort()["meta_info"]["finish_reason"]["type"] == "abort"
    server.wait_idle()
    server.check_healthy()
    assert len(server.generate(tokens(rng, 30), 5, timeout=600)["output_ids"]) == 5
