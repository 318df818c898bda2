"""Requests that leave in every state, and what an operator does to a busy server.

The fixture checks after each test that no cell is lost and that the server answers as before.
"""

from __future__ import annotations

import base64
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import requests

from tests.server.conftest import CELLS_PER_TOKEN, CHUNK, RUNNING, WINDOW, Rig
from tests.servers import Server, model_path
from tests.streams import Call
from tests.workloads import tokens

pytestmark = pytest.mark.server

LONG = 2000


def until(condition: Callable[[], bool], what: str, seconds: float = 600) -> None:
    """Poll `condition`; raises when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s in vain for {what}")
        time.sleep(0.005)


def queue_length(server: Server) -> int:
    """Requests that the scheduler holds back."""
    loads = requests.get(f"{server.url}/v1/loads", timeout=600).json()["loads"]
    return sum(load["num_waiting_reqs"] for load in loads)


def prefill_steps(server: Server) -> int:
    return server.log().count("Prefill batch")


@contextmanager
def busy(server: Server, rng: random.Random) -> Iterator[list[Call]]:
    """As many decoding requests as the server runs together; they are left at the end."""
    calls = [Call(server, tokens(rng, 20), LONG) for _ in range(RUNNING)]
    try:
        assert all(call.read(1) for call in calls)
        yield calls
    finally:
        for call in calls:
            call.leave()


def end(call: Call, way: str) -> dict[str, Any] | None:
    """End `call` the given way; its last chunk if the way has one."""
    if way == "disconnect":
        return call.leave()
    last = call.abort()
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    return last


@pytest.mark.parametrize("way", ["abort", "disconnect"])
def test_leaving_the_queue(rig: Rig, way: str) -> None:
    rng = random.Random(1)
    with busy(rig.server, rng) as others, Call(rig.server, tokens(rng, 100), 8) as call:
        until(lambda: queue_length(rig.server) == 1, "the request to queue")
        last = end(call, way)
        assert last is None or last["output_ids"] == []
        until(lambda: queue_length(rig.server) == 0, "the queue to empty")
        # Those that ran go on.
        assert all(other.read(other.last["meta_info"]["completion_tokens"] + 2) for other in others if other.last)


@pytest.mark.parametrize("way", ["abort", "disconnect"])
@pytest.mark.parametrize("beside", [0, 1], ids=["alone", "beside a decode"])
def test_leaving_in_the_middle_of_a_prompt(rig: Rig, way: str, beside: int) -> None:
    """After a few of 60 chunks. Both kinds of neighbours: none, and one whose decode steps alternate with the chunks."""
    rng = random.Random(2)
    prompt = tokens(rng, 60 * CHUNK)
    others = [Call(rig.server, tokens(rng, 20), LONG) for _ in range(beside)]
    assert all(other.read(1) for other in others)
    before = prefill_steps(rig.server)
    with Call(rig.server, prompt, 8) as call:
        until(lambda: prefill_steps(rig.server) >= before + 3, "the third chunk")
        last = end(call, way)
        assert last is None or last["output_ids"] == []
    for other in others:
        assert other.read(WINDOW)
        other.leave()
    rig.server.wait_idle()
    assert prefill_steps(rig.server) < before + 60, "the whole prompt ran: nothing was tested"
    # What the chunks left in the tree serves the same prompt.
    again = rig.server.generate(prompt, 4, timeout=600)
    assert 2 * CHUNK <= again["meta_info"]["cached_tokens"] < len(prompt)


@pytest.mark.parametrize("way", ["abort", "disconnect"])
@pytest.mark.parametrize(
    "reached",
    [(1,), (2, 3, 10), (WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2), (3 * WINDOW,)],
    ids=["first decode", "decode", "settling", "settled"],
)
def test_leaving_in_decode(rig: Rig, way: str, reached: tuple[int, ...]) -> None:
    """At each of `reached` generated tokens: window 32, so that the first generated token settles at the 32nd."""
    rng = random.Random(3)
    for count in reached:
        rig.server.flush()
        prompt = tokens(rng, 2 * WINDOW + 6)
        with Call(rig.server, prompt, LONG) as call:
            assert call.read(count)
            last = end(call, way)
        rig.server.wait_idle()
        if last is not None:
            check_what_it_left(rig, prompt, last)


def check_what_it_left(rig: Rig, prompt: list[int], last: dict[str, Any]) -> None:
    """An aborted answer's statistics fit its length; a turn on top of it finds all of it and is right."""
    fewest = len(prompt) + len(last["output_ids"]) - 1
    # An abort also keeps the step that overlap had launched beyond the last output.
    assert last["meta_info"]["kv_press"]["dense_cells"] in (fewest * CELLS_PER_TOKEN, (fewest + 1) * CELLS_PER_TOKEN)
    turn = prompt + last["output_ids"] + [5, 6, 7]
    found = rig.server.generate(turn, 8, timeout=600)
    assert found["meta_info"]["cached_tokens"] >= fewest
    if rig.prefill == "sparse":
        # A hit equals a cold run there; dense prefill differs by design.
        assert found["output_ids"] == rig.cold(turn, 8)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_pausing_a_busy_server(rig: Rig, mode: str) -> None:
    """`/pause_generation`, then `/continue_generation`: in decode beside a half-prefilled prompt."""
    rng = random.Random(4)
    prompt = tokens(rng, 20)
    alone = rig.cold(prompt, 6 * WINDOW)
    rig.server.flush()
    before = prefill_steps(rig.server)
    with Call(rig.server, prompt, 6 * WINDOW) as decoding, Call(rig.server, tokens(rng, 40 * CHUNK), 8) as half:
        until(lambda: prefill_steps(rig.server) >= before + 4, "chunks")
        post(rig, "pause_generation", {"mode": mode})
        time.sleep(0.3)
        post(rig, "continue_generation", {})
        for call in (decoding, half):
            call.read(1 << 30)
        if mode == "abort":
            kinds = {call.last["meta_info"]["finish_reason"]["type"] for call in (decoding, half) if call.last}
            assert kinds == {"abort"}
            return
        assert half.last is not None and len(half.last["output_ids"]) == 8
        assert decoding.last is not None and len(decoding.last["output_ids"]) == 6 * WINDOW
        if mode == "in_place":
            assert decoding.last["output_ids"] == alone


def post(rig: Rig, path: str, body: dict[str, Any]) -> requests.Response:
    return requests.post(f"{rig.server.url}/{path}", json=body, timeout=600)


def test_flush_under_traffic(rig: Rig) -> None:
    """Refused while requests run, and harmless to them."""
    rng = random.Random(5)
    prompt = tokens(rng, 50)
    alone = rig.cold(prompt, 100)
    rig.server.flush()
    with Call(rig.server, prompt, 100) as call:
        refused = 0
        for count in range(1, 90, 8):
            assert call.read(count)
            refused += not post(rig, "flush_cache", {}).ok
        call.read(1 << 30)
        assert call.last is not None and call.last["output_ids"] == alone
    assert refused > 5
    # Idle or busy when it arrives: every flush is either done or refused, every request answered.
    for length in (10, 100, 10, 200, 1, 90):
        with Call(rig.server, tokens(rng, length), 3) as call:
            post(rig, "flush_cache", {})
            assert call.read(3)


WEIGHTS: dict[str, dict[str, Any]] = {
    "update_weights_from_disk": {"model_path": "tiny-llama-random"},
    "update_weights_from_tensor": {"serialized_named_tensors": [base64.b64encode(b"nothing").decode()]},
    "update_weights_from_distributed": {"names": ["lm_head.weight"], "dtypes": ["float32"], "shapes": [[1]]},
    "update_weights_from_ipc": {"zmq_handles": {"cpu": "ipc:///nowhere"}},
    # What comes before them: after it the weights may be written from outside.
    "begin_weight_update": {},
    "init_weights_update_group": {
        "master_address": "localhost", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo",
    },
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(WEIGHTS))
def test_weight_updates_are_refused(rig: Rig, path: str) -> None:
    """Each says why, and the server goes on with the weights that it has."""
    body = dict(WEIGHTS[path])
    if "model_path" in body:
        body["model_path"] = model_path(body["model_path"])
    answer = post(rig, path, body)
    assert not answer.json()["success"]
    assert "--kv-press" in answer.json()["message"]


def test_releasing_memory_and_taking_it_back(rig: Rig) -> None:
    """Without a memory saver nothing is released: the cache is flushed and the server goes on."""
    rig.server.generate(tokens(random.Random(6), 100), 4)
    rig.server.wait_idle()
    assert post(rig, "release_memory_occupation", {}).ok
    assert post(rig, "resume_memory_occupation", {}).ok
    assert rig.server.press_info()["cells_tree"] == 0
