"""The server keeps and answers what an independent dense forward with masks says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvzap_sglang.evaluate.oracle import OracleResult, Turn, run_oracle
from kvzap_sglang.observe import unpack_kept
from kvzap_sglang.presses.surrogate import load_surrogate
from kvzap_sglang.surrogates import shipped_surrogate
from tests.compare import output_logprobs
from tests.goldens import kvpress_runs
from tests.servers import Server, model_path, serve
from tests.workloads import tokens

pytestmark = pytest.mark.server

MODEL = "SmolLM2-135M-Instruct-fp32"
WINDOW = 128
SCORE_NOISE = 1e-3
LOGPROB_NOISE = 2e-3
FIRST, SECOND = 200, 60


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(model_path(MODEL), dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=[-4.0, -3.0])
def pruned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, float]]:
    """A server with the mlp surrogate, and its threshold. Chunks are smaller than the prompts."""
    press = ("--kv-press", "kvzap", "--kv-press-model", str(shipped_surrogate("mlp")))
    flags = ("--dtype", "float32", "--max-total-tokens", "8192", "--chunked-prefill-size", "512")
    log = tmp_path_factory.mktemp("pruned") / "server.log"
    with serve(model_path(MODEL), log, *flags, *press, f"--kv-press-threshold={request.param}") as server:
        yield server, request.param


def golden_prompts() -> list[list[int]]:
    """Real text of 300, 700 and 1260 tokens."""
    prompts = {len(run["prompt_ids"]): run["prompt_ids"] for run in kvpress_runs()}
    return [prompts[n] for n in sorted(prompts)]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["300", "700", "1260"])
def test_two_turns_equal_the_oracle(pruned: tuple[Server, float], model: Any, which: int) -> None:
    server, threshold = pruned
    server.flush()
    prompt = golden_prompts()[which]
    first = server.generate(prompt, FIRST, custom={"return_kept": True}, logprob=True)
    info = server.press_info()
    assert info["cells_total"] - info["cells_free"] == first["meta_info"]["kv_press"]["kept_cells"]

    follow_up = prompt + first["output_ids"] + tokens(random.Random(which), 40)
    second = server.generate(follow_up, SECOND, custom={"return_kept": True}, logprob=True)
    hit = second["meta_info"]["cached_tokens"]
    assert hit == len(prompt) + FIRST - 1

    sequence = follow_up + second["output_ids"]
    turns = [
        Turn(prompt_len=len(prompt), hit=0, end=len(prompt) + FIRST - 1),
        Turn(prompt_len=len(follow_up), hit=hit, end=len(sequence) - 1),
    ]
    surrogate = load_surrogate(str(shipped_surrogate("mlp")), dtype=torch.float32, device="cpu")
    expected = run_oracle(model, surrogate, sequence, turns, threshold=threshold, window=WINDOW)
    for answer, turn in ((first, turns[0]), (second, turns[1])):
        _check_kept(answer, expected, turn.end, threshold)
        logprobs = expected.token_logprobs[turn.prompt_len - 1 : turn.end].tolist()
        worst = max(abs(a - b) for a, b in zip(output_logprobs(answer), logprobs, strict=True))
        assert worst <= LOGPROB_NOISE, f"logprobs differ by {worst}"
    assert first["meta_info"]["kv_press"]["kept_fraction"] < 0.85


def _check_kept(answer: dict[str, Any], expected: OracleResult, held: int, threshold: float) -> None:
    stats = answer["meta_info"]["kv_press"]
    kept = torch.from_numpy(unpack_kept(stats))
    assert kept.shape == (held, *expected.kept.shape[1:])
    wrong = kept != expected.kept[:held]
    certain = (expected.scores[:held] - threshold).abs() >= SCORE_NOISE
    assert int((wrong & certain).sum()) == 0
    assert int(wrong.sum()) <= 1e-3 * wrong.numel()
    per_token = kept.shape[1] * kept.shape[2]
    window = WINDOW + 1  # of the last position held: itself and so many before
    in_memory = int(kept[: held - window].sum()) + window * per_token
    assert stats["kept_cells"] == in_memory
    assert stats["dense_cells"] == held * per_token
