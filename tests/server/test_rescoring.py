"""Input logprobs of a prompt that the tree already holds, settled, equal a cold run's."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import requests

from tests.servers import Server, model_path, serve
from tests.surrogates import make_surrogate
from tests.workloads import tokens

pytestmark = pytest.mark.server

TINY = "tiny-llama-random"
CHUNK, WINDOW = 256, 32


def input_logprobs(server: Server, prompt: list[int]) -> list[float]:
    """Logprob of every prompt token but the first. Asking for all of them bars a prefix hit."""
    body = {
        "input_ids": prompt,
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 1},
    }
    answer = requests.post(f"{server.url}/generate", json=body, timeout=600).json()
    assert answer["meta_info"]["cached_tokens"] == 0
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


@pytest.mark.parametrize("prefill", ["dense", "sparse"])
def test_the_tree_does_not_take_a_scored_prompts_cells(prefill: str, tmp_path: Path) -> None:
    """A chunk's checkpoint must not swap the cells that the next chunk attends to for the tree's pruned ones."""
    surrogate = make_surrogate(tmp_path / "s", hidden=64, layers=2, kv_heads=2)
    press = ("--kv-press", "kvzap", "--kv-press-model", str(surrogate), "--kv-press-threshold", "0")
    press += ("--kv-press-window", str(WINDOW), "--kv-press-prefill", prefill)
    sizes = ("--dtype", "float32", "--max-total-tokens", "4096", "--chunked-prefill-size", str(CHUNK))
    rng = random.Random(12)
    whole = tokens(rng, 2 * CHUNK + 88)
    branch = whole[: CHUNK + 100] + tokens(rng, CHUNK)
    with serve(model_path(TINY), tmp_path / "server.log", *press, *sizes) as server:
        cold = [input_logprobs(server, branch)]
        server.flush()
        cold.append(input_logprobs(server, whole))
        again = [input_logprobs(server, branch), input_logprobs(server, whole)]
        server.flush()
        info = server.press_info()
        assert info["cells_free"] == info["cells_total"]
        assert info["pruned_cells_total"] > 0
    for expected, answer in zip(cold, again, strict=True):
        assert max(abs(a - b) for a, b in zip(expected, answer, strict=True)) <= 1e-4
