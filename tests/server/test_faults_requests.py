"""Unusual requests, one kind after the other: lengths, stops, scoring, sessions, sampling, grammars.

The fixture checks after each test that no cell is lost and that the server answers as before.
"""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

import pytest
import requests

from tests.server.conftest import CELLS_PER_TOKEN, LAYERS, RUNNING, WINDOW, Rig
from tests.workloads import tokens

pytestmark = pytest.mark.server


def post(rig: Rig, path: str, body: dict[str, Any]) -> Any:
    """The JSON answer; raises with the server's text."""
    answer = requests.post(f"{rig.server.url}/{path}", json=body, timeout=600)
    assert answer.ok, answer.text
    return answer.json()


def greedy(new_tokens: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, **more}


@pytest.mark.parametrize("new_tokens", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 64, 65])
def test_lengths(rig: Rig, length: int, new_tokens: int) -> None:
    """Around nothing, the window and the chunk: the right number of tokens, cells as the window says."""
    rig.server.flush()
    prompt = tokens(random.Random(length), length)
    answer = rig.server.generate(prompt, new_tokens)
    assert len(answer["output_ids"]) == new_tokens
    stats = answer["meta_info"]["kv_press"]
    held = length + max(new_tokens - 1, 0)
    assert stats["dense_cells"] == held * CELLS_PER_TOKEN
    assert stats["kept_cells"] >= min(held, WINDOW + 1) * CELLS_PER_TOKEN
    if held <= WINDOW + 1:
        assert stats["kept_cells"] == stats["dense_cells"]
    # Once more on what the first one left: where that is pruned within a window of the last token, the window is
    # computed again (in sparse mode one window per layer), once.
    pruned = held - 1 - WINDOW > max(0, length - 1 - WINDOW)
    depth = WINDOW * (LAYERS if rig.prefill == "sparse" else 1)
    for cached in (max(0, length - 1 - depth) if pruned else length - 1, length - 1):
        again = rig.server.generate(prompt, new_tokens)
        assert again["meta_info"]["cached_tokens"] == cached
        assert len(again["output_ids"]) == new_tokens


@pytest.mark.parametrize("length", [2, WINDOW, WINDOW + 1, WINDOW + 2, 100, 129])
def test_fully_cached_prompt(rig: Rig, length: int) -> None:
    """All but the last token are in the cache, which ends there: sparse prefill answers as on an empty one."""
    prompt = tokens(random.Random(1000 + length), length)
    cold = rig.cold(prompt, WINDOW + 8)
    rig.server.flush()
    rig.server.generate(prompt[:-1], 1)
    hit = rig.server.generate(prompt, WINDOW + 8)
    assert hit["meta_info"]["cached_tokens"] == length - 1
    assert len(hit["output_ids"]) == WINDOW + 8
    if rig.prefill == "sparse" or length <= WINDOW:
        assert hit["output_ids"] == cold


@pytest.mark.parametrize("kind", ["stop_token_ids", "stop"])
@pytest.mark.parametrize("at", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1])
def test_stops(rig: Rig, kind: str, at: int) -> None:
    """A stop at output `at`: overlap has launched the step after it by then. The next turn finds no trace of that."""
    prompt = tokens(random.Random(at), WINDOW + 20)
    free = rig.cold(prompt, at + 10)
    stop: Any = [free[at]]
    if kind == "stop":
        stop = [post(rig, "detokenize", {"tokens": stop})["text"]]
    rig.server.flush()
    answer = rig.server.generate(prompt, at + 10, ignore_eos=False, **{kind: stop})
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    end = len(answer["output_ids"])
    assert end <= at + 1 and answer["output_ids"] == free[:end]
    if kind == "stop_token_ids":
        assert end == free.index(free[at]) + 1
    held = answer["meta_info"]["kv_press"]["dense_cells"] // CELLS_PER_TOKEN
    # With the last output or without it: the overrun step has computed it, if there was one.
    assert len(prompt) + end - 1 <= held <= len(prompt) + end
    turn = prompt + free[:end] + [5, 6, 7]
    found = rig.server.generate(turn, 8)
    assert found["meta_info"]["cached_tokens"] == held
    if rig.prefill == "sparse":
        assert found["output_ids"] == rig.cold(turn, 8)


def input_logprobs(rig: Rig, prompt: list[int], new_tokens: int) -> list[float]:
    body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 0, "sampling_params": greedy(new_tokens)}
    answer = post(rig, "generate", body)
    assert len(answer["output_ids"]) == new_tokens
    values = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
    assert len(values) == len(prompt) and values[0] is None
    return values[1:]


@pytest.mark.parametrize("length", [1, WINDOW, 3 * WINDOW, 200])
def test_scoring_a_prompt(rig: Rig, length: int) -> None:
    """`max_new_tokens=0` with the prompt's logprobs: the same beside a decode, and on a warm cache."""
    prompt = tokens(random.Random(length), length)
    cold = input_logprobs(rig, prompt, 0)
    assert all(value <= 0 and math.isfinite(value) for value in cold)
    rig.server.generate(prompt, WINDOW)
    for new_tokens in (0, 1, 5):
        assert input_logprobs(rig, prompt, new_tokens) == pytest.approx(cold, abs=1e-4)


def test_score_endpoint(rig: Rig) -> None:
    """Together on one query; and one by one on an empty cache, where a plain request gives the same numbers."""
    rng = random.Random(8)
    query, labels = tokens(rng, 90), [11, 500, 7000]
    items = [tokens(rng, n) for n in (1, 5, WINDOW, 70)]
    body = {"query": query, "label_token_ids": labels, "apply_softmax": True, "model": "default"}
    together = post(rig, "v1/score", body | {"items": items})["scores"]
    assert [len(row) for row in together] == [3] * 4
    assert all(sum(row) == pytest.approx(1.0, abs=1e-4) for row in together)
    for item in items:
        rig.server.flush()
        (alone,) = post(rig, "v1/score", body | {"items": [item]})["scores"]
        rig.server.flush()
        asked = {"input_ids": query + item, "return_logprob": True, "token_ids_logprob": labels}
        (step,) = post(rig, "generate", asked | {"sampling_params": greedy(1)})["meta_info"][
            "output_token_ids_logprobs"
        ]
        weights = [math.exp(entry[0]) for entry in step]
        assert alone == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-4)


def test_sessions(rig: Rig) -> None:
    """Turns in a non-streaming session: appended, branched at an earlier turn, replaced, closed."""
    rng = random.Random(9)
    session = post(rig, "open_session", {"capacity_of_str_len": 100000})

    def turn(ids: list[int], **params: Any) -> dict[str, Any]:
        body = {"input_ids": ids, "session_params": {"id": session, **params}, "sampling_params": greedy(20)}
        return post(rig, "generate", body)

    first = turn(tokens(rng, 70))
    start = first["meta_info"]["id"]
    second = turn(tokens(rng, 10), rid=start)
    # All that the first turn held (its last token was never computed), then the new tokens.
    assert second["meta_info"]["cached_tokens"] == 70 + 20 - 1
    assert second["meta_info"]["prompt_tokens"] == 70 + 20 + 10
    branch = turn(tokens(rng, 15), rid=start, offset=40)
    assert branch["meta_info"]["prompt_tokens"] == 40 + 15
    replaced = turn(tokens(rng, 5), rid=start, replace=True, drop_previous_output=True)
    assert replaced["meta_info"]["prompt_tokens"] == 70 + 5
    assert all(len(answer["output_ids"]) == 20 for answer in (first, second, branch, replaced))
    requests.post(f"{rig.server.url}/close_session", json={"session_id": session}, timeout=600).raise_for_status()


@pytest.mark.parametrize("length", [5, 64, 100])
def test_several_samples(rig: Rig, length: int) -> None:
    """`n` equal answers at temperature 0 when all run together; more of them queue, find a prompt that the first
    ones have settled past (`accept`), and end in full."""
    prompt = tokens(random.Random(length), length)
    same = post(rig, "generate", {"input_ids": prompt, "sampling_params": greedy(WINDOW + 4, n=RUNNING)})
    assert len(same) == RUNNING
    assert all(answer["output_ids"] == same[0]["output_ids"] for answer in same)
    if length <= WINDOW:
        assert same[0]["output_ids"] == rig.cold(prompt, WINDOW + 4)
    hot = post(rig, "generate", {"input_ids": prompt, "sampling_params": greedy(9, n=6) | {"temperature": 1.0}})
    assert [len(answer["output_ids"]) for answer in hot] == [9] * 6


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}


def test_grammars(rig: Rig) -> None:
    """Constrained output, alone and beside free requests; the grammar ends the answer."""
    rng = random.Random(10)
    free = tokens(rng, 40)
    alone = rig.cold(free, 60)
    constrained: list[dict[str, Any]] = [
        {"input_ids": tokens(rng, 50), "max_new_tokens": 60, "ignore_eos": False, **rule}
        for rule in ({"regex": "[0-9]{6}-[a-c]{40}"}, {"json_schema": json.dumps(SCHEMA)})
    ]
    rig.server.flush()
    plain = {"input_ids": free, "max_new_tokens": 60}
    number, document, beside = rig.server.generate_all([*constrained, plain])
    assert re.fullmatch("[0-9]{6}-[a-c]{40}", number["text"])
    assert json.loads(document["text"]).keys() == {"a", "b"}
    assert beside["output_ids"] == alone
