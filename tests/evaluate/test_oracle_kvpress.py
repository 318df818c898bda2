"""The oracle against greedy runs of NVIDIA's kvpress 0.5.5 on SmolLM2-135M-Instruct (fp32), with the shipped surrogates."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch

from kvzap_sglang.evaluate.oracle import OracleResult, Turn, run_oracle
from kvzap_sglang.presses.surrogate import load_surrogate
from kvzap_sglang.surrogates import shipped_surrogate
from tests.goldens import kvpress_runs
from tests.servers import model_path

MODEL = "SmolLM2-135M-Instruct"
WINDOW = 128
NEAR = 1e-3  # scores this close to the threshold, and top-2 margins this small, may fall either way in fp32
# (tokens of the prompt, surrogate, whether generated tokens are pruned). Every configuration once, every length once: all
# twelve agree, but take two minutes of one core.
CASES = [
    (300, None, False),
    (300, "mlp", False),
    (300, "mlp", True),
    (300, "linear", True),
    (700, "mlp", False),
    (700, "mlp", True),
    (1260, "linear", True),
]


@cache
def model() -> Any:
    from transformers import AutoModelForCausalLM

    # The goldens come from the bf16 folder's weights, computed in fp32.
    return AutoModelForCausalLM.from_pretrained(model_path(MODEL), dtype=torch.float32).eval()


def golden(*case: object) -> dict[str, Any]:
    (found,) = [run for run in kvpress_runs() if (len(run["prompt_ids"]), run["kind"], run["decoding"]) == case]
    return found


def oracle_of(run: dict[str, Any]) -> OracleResult:
    kind, threshold = run["kind"] or "mlp", -math.inf if run["threshold"] is None else run["threshold"]
    surrogate = load_surrogate(str(shipped_surrogate(kind, MODEL)), dtype=torch.float32, device="cpu")
    tokens = run["prompt_ids"] + run["output_ids"]
    prompt, end = len(run["prompt_ids"]), len(tokens) - 1  # the last output token never went through the model
    turns = [Turn(prompt, 0, end)]
    if not run["decoding"]:
        # Nothing after the prefill is pruned: that is a dense prompt over a cached prefix, the first prompt.
        turns = [Turn(prompt, 0, prompt), Turn(end, prompt, end)]
    return run_oracle(model(), surrogate, tokens, turns, threshold=threshold, window=WINDOW)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reproduces_kvpress(case: tuple[int, str | None, bool]) -> None:
    run = golden(*case)
    result = oracle_of(run)
    first = len(run["prompt_ids"]) - 1
    steps = slice(first, first + len(run["output_ids"]))
    margins = torch.tensor(run["top2_margin"])
    clear = margins >= NEAR
    assert clear.sum() >= len(margins) - 2
    assert torch.equal(result.argmax[steps][clear], torch.tensor(run["output_ids"])[clear])
    torch.testing.assert_close(result.margins[steps], margins, atol=NEAR, rtol=0)
    if run["masked"]:
        check_counts(result, run)


def check_counts(result: OracleResult, run: dict[str, Any]) -> None:
    """Masked keys per layer and head when generation ended, or after the prefill where only that is pruned."""
    length = len(result.kept) if run["decoding"] else len(run["prompt_ids"])
    counts = result.pruned_counts(length, WINDOW)
    masked = torch.tensor(run["masked"])
    doubtful = ((result.scores[: length - WINDOW] - run["threshold"]).abs() < NEAR).sum(dim=0)
    assert ((counts - masked).abs() <= doubtful).all()
    assert (doubtful == 0).sum() > masked.numel() // 2
    assert counts.double().mean().item() / length == pytest.approx(masked.double().mean().item() / length, abs=1e-4)
