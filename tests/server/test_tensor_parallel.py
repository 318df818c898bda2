"""Two ranks that keep different numbers of pairs schedule alike and answer like one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvzap_sglang.observe import unpack_kept
from tests.compare import assert_same_generation
from tests.servers import Server, model_path, serve
from tests.surrogates import make_surrogate
from tests.workloads import mixed_prompts, run_mixed, tokens

pytestmark = pytest.mark.server

TINY = "tiny-llama-random"
RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
SMALL_ROOM = 900
"""Dense tokens: run_mixed needs several times as many, so that ranks must also evict and wait alike."""


@contextmanager
def start(folder: Path, ranks: int, prefill: str, room: int) -> Iterator[Server]:
    folder.mkdir(parents=True, exist_ok=True)
    make_surrogate(folder / "surrogate", hidden=64, layers=2, kv_heads=2, seed=4)
    flags = ["--dtype", "float32", "--max-running-requests", "8", "--chunked-prefill-size", "64"]
    flags += ["--max-total-tokens", str(room), "--tp-size", str(ranks)]
    flags += ["--kv-press", "kvzap", "--kv-press-model", str(folder / "surrogate"), "--kv-press-threshold", "0"]
    flags += ["--kv-press-window", "32", "--kv-press-prefill", prefill]
    env = RANKS if ranks > 1 else None
    with serve(model_path(TINY), folder / "server.log", *flags, env=env) as server:
        yield server


def ordered(server: Server, second_turns: list[list[int]] | None) -> list[dict[str, Any]]:
    """Chains, branches and second turns one after the other, so that what is shared does not hang on timing."""
    rng = random.Random(22)
    prompts = [prompt for wave in mixed_prompts(21) for prompt in wave]
    answers = [server.generate(prompt, 24, logprob=True) for prompt in prompts]
    if second_turns is None:
        second_turns = [prompts[i] + answers[i]["output_ids"] + tokens(rng, 30) for i in (0, 2, 3, 6, 12, 20)]
    answers += [server.generate(prompt, 24, logprob=True) for prompt in second_turns]
    for answer, prompt in zip(answers, [*prompts, *second_turns], strict=True):
        answer["prompt"] = prompt
    return answers


def together(server: Server) -> list[dict[str, Any]]:
    """Eight that share nothing, in one batch."""
    rng = random.Random(23)
    calls = [{"input_ids": tokens(rng, 30 + 40 * i), "max_new_tokens": 40, "logprob": True} for i in range(8)]
    return server.generate_all(calls)


def test_two_ranks_answer_like_one(tmp_path: Path) -> None:
    with start(tmp_path / "one", 1, "dense", 16000) as one:
        expected = ordered(one, None)
        second_turns = [answer["prompt"] for answer in expected[-6:]]
        expected += together(one)
    with start(tmp_path / "two", 2, "dense", 16000) as two:
        answers = ordered(two, second_turns) + together(two)
        stats = two.generate(expected[0]["prompt"], 40, custom={"return_kept": True})["meta_info"]["kv_press"]
        two.wait_idle()
    compared = [assert_same_generation(a, b, tolerance=1e-4) for a, b in zip(expected, answers, strict=True)]
    assert sum(compared) > 400
    for one_turn, two_turns in zip(expected, answers, strict=True):
        assert one_turn["meta_info"]["cached_tokens"] == two_turns["meta_info"]["cached_tokens"]
        assert one_turn["meta_info"]["kv_press"]["dense_cells"] == two_turns["meta_info"]["kv_press"]["dense_cells"]
        assert one_turn["meta_info"]["kv_press"]["kept_cells"] == pytest.approx(
            two_turns["meta_info"]["kv_press"]["kept_cells"], abs=2
        )
    kept_by_head = unpack_kept(stats).sum(axis=(0, 1))
    assert len(kept_by_head) == 2 and kept_by_head[0] != kept_by_head[1], "the ranks kept the same: nothing is shown"


def test_ranks_agree_when_memory_is_short(tmp_path: Path) -> None:
    with start(tmp_path, 2, "sparse", SMALL_ROOM) as two:
        answers = run_mixed(two, 22)
        assert all(len(answer["output_ids"]) in (16, 24) for answer in answers)
        info = two.press_info()
        assert info["evicted_cells_total"] + info["reclaimed_cells_total"] > 0
        two.flush()
        flushed = two.press_info()
        assert flushed["cells_free"] == flushed["cells_total"]
