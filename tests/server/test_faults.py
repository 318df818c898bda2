"""Abort, retraction, exhaustion, flush: the pool comes back whole and answers stay right."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import requests

from tests.compare import assert_same_generation
from tests.servers import Server, model_path, serve
from tests.surrogates import tiny_press
from tests.workloads import run_mixed, tokens

pytestmark = pytest.mark.server

TINY = "tiny-llama-random"
FLAGS = ("--dtype", "float32", "--max-running-requests", "8", "--chunked-prefill-size", "64")


def test_retraction_changes_no_answer(tmp_path: Path) -> None:
    """Forced retraction, small pool: every request ends, answers equal the unretracted ones."""
    rng = random.Random(3)
    prompts = [tokens(rng, rng.randint(20, 150)) for _ in range(8)]
    calls = [{"input_ids": p, "max_new_tokens": 60, "logprob": True} for p in prompts]
    flags = tiny_press(tmp_path / "s")
    with serve(model_path(TINY), tmp_path / "solo.log", *FLAGS, *flags, "--max-total-tokens", "4096") as server:
        solo = [server.generate(**call) for call in calls]
    env = {"SGLANG_TEST_RETRACT": "1"}
    room = ("--max-total-tokens", "700", "--disable-radix-cache")
    with serve(model_path(TINY), tmp_path / "busy.log", *FLAGS, *flags, *room, env=env) as server:
        busy = server.generate_all(calls)
        assert "retract" in server.log().lower()
        server.wait_idle()
    for expected, answer in zip(solo, busy, strict=True):
        assert_same_generation(expected, answer, tolerance=2e-3)


def test_retraction_with_a_tree(tmp_path: Path) -> None:
    """The same with prefix sharing: nothing leaks, every request is answered."""
    env = {"SGLANG_TEST_RETRACT": "1"}
    room = ("--max-total-tokens", "1200")
    with serve(model_path(TINY), tmp_path / "log", *FLAGS, *tiny_press(tmp_path / "s"), *room, env=env) as server:
        answers = run_mixed(server, 11)
        assert all(len(a["output_ids"]) in (16, 24) for a in answers)
        info = server.wait_idle()
        assert info["pruned_cells_total"] > 0
        server.flush()
        assert server.press_info()["cells_free"] == info["cells_total"]


@pytest.mark.parametrize("prefill", ["dense", "sparse"])
def test_aborts_give_everything_back(prefill: str, tmp_path: Path) -> None:
    """Clients that leave while queued, in the middle of a chunked prompt, and in decode."""
    flags = (*FLAGS, *tiny_press(tmp_path / "s"), "--max-total-tokens", "2048", "--kv-press-prefill", prefill)
    rng = random.Random(9)
    with serve(model_path(TINY), tmp_path / "log", *flags) as server:
        before = server.generate(tokens(random.Random(1), 100), 8)["output_ids"]
        threads = [
            threading.Thread(
                target=_leave, args=(server, tokens(rng, rng.choice([40, 500, 900])), rng.uniform(0.01, 1.5))
            )
            for _ in range(40)
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.02)
        for thread in threads:
            thread.join()
        info = server.wait_idle()
        server.flush()
        assert server.press_info()["cells_free"] == info["cells_total"]
        assert server.generate(tokens(random.Random(1), 100), 8)["output_ids"] == before


def _leave(server: Server, prompt: list[int], seconds: float) -> None:
    body = {"input_ids": prompt, "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    try:
        with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=seconds) as answer:
            deadline = time.monotonic() + seconds
            for _ in answer.iter_lines():
                if time.monotonic() > deadline:
                    break
    except requests.RequestException:
        return  # gave up before the first byte: that is the point


def test_pool_for_one_request_serves_many(tmp_path: Path) -> None:
    """1.2 times one request's cells: requests queue, evict each other's prefixes, and all end right."""
    flags = (*FLAGS, *tiny_press(tmp_path / "s"))
    rng = random.Random(21)
    calls = [{"input_ids": tokens(rng, 200), "max_new_tokens": 30, "logprob": True} for _ in range(12)]
    with serve(model_path(TINY), tmp_path / "large.log", *flags, "--max-total-tokens", "8192") as server:
        roomy = [server.generate(**call) for call in calls]
    with serve(model_path(TINY), tmp_path / "small.log", *flags, "--max-total-tokens", "280") as server:
        tight = server.generate_all(calls)
        info = server.wait_idle()
        assert info["evicted_cells_total"] > 0
    for expected, answer in zip(roomy, tight, strict=True):
        assert_same_generation(expected, answer, tolerance=2e-3)
