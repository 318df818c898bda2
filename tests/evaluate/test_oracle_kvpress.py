"""The oracle against greedy runs of NVIDIA's kvpress 0.5.5 on SmolLM2-135M-Instruct (fp32)."""

from __future__ import annotations

import json
import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kvzap_sglang.evaluate.oracle import OracleResult, Turn, run_oracle
from kvzap_sglang.presses.surrogate import load_surrogate

REPOSITORY = Path(__file__).resolve().parents[2]
DATA = REPOSITORY.parent / "shared" / "data"
MODEL = Path(os.environ.get("KVZAP_TEST_MODELS", REPOSITORY / "models")) / "SmolLM2-135M-Instruct"
WINDOW = 128
NEAR = 1e-3  # scores this close to the threshold, and top-2 margins this small, may fall either way in fp32
CONFIGS = {
    "full": ("mlp", -math.inf),
    "mlp -4 decoding=False": ("mlp", -4.0),
    "mlp -4 decoding=True": ("mlp", -4.0),
    "linear -3 decoding=True": ("linear", -3.0),
}
# Every configuration once, every length once: all twelve agree, but take two minutes of one core.
CASES = [
    *((300, config) for config in CONFIGS),
    (700, "mlp -4 decoding=False"),
    (700, "mlp -4 decoding=True"),
    (1260, "linear -3 decoding=True"),
]


@cache
def model() -> Any:
    from transformers import AutoModelForCausalLM

    # The goldens come from the bf16 folder's weights, computed in fp32.
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@cache
def goldens() -> dict[tuple[int, str], dict[str, Any]]:
    runs = json.loads((DATA / "golden_smollm2_kvpress.json").read_text())
    return {(run["T"], run["config"]): run for run in runs}


def oracle_of(run: dict[str, Any]) -> OracleResult:
    kind, threshold = CONFIGS[run["config"]]
    folder = DATA / f"KVzap-{kind}-SmolLM2-135M-Instruct"
    surrogate = load_surrogate(str(folder), dtype=torch.float32, device="cpu")
    tokens = run["prompt_ids"] + run["output_ids"]
    prompt, end = run["T"], len(tokens) - 1  # the last output token never went through the model
    turns = [Turn(prompt, 0, end)]
    if run["config"].endswith("decoding=False"):
        # Nothing after the prefill is pruned: that is a dense prompt over a cached prefix, the first prompt.
        turns = [Turn(prompt, 0, prompt), Turn(end, prompt, end)]
    return run_oracle(model(), surrogate, tokens, turns, threshold=threshold, window=WINDOW)


@pytest.mark.parametrize(("length", "config"), CASES)
def test_reproduces_kvpress(length: int, config: str) -> None:
    for needed in (DATA / "golden_smollm2_kvpress.json", MODEL):
        if not needed.exists():
            pytest.skip(f"{needed} is absent (models: `python -m kvzap_sglang_cpu.smollm2 --out models`)")
    run = goldens()[length, config]
    result = oracle_of(run)
    steps = slice(run["T"] - 1, run["T"] - 1 + len(run["output_ids"]))
    margins = torch.tensor(run["top2_margin"])
    clear = margins >= NEAR
    assert clear.sum() >= len(margins) - 2
    assert torch.equal(result.argmax[steps][clear], torch.tensor(run["output_ids"])[clear])
    # The file rounds margins to 3 decimals.
    torch.testing.assert_close(result.margins[steps], margins, atol=NEAR, rtol=0)
    if config != "full":
        check_counts(result, run)


def check_counts(result: OracleResult, run: dict[str, Any]) -> None:
    """Masked keys per layer and head when generation ended, or after the prefill with decoding=False."""
    length = run["T"] if run["config"].endswith("decoding=False") else len(result.kept)
    counts = result.pruned_counts(length, WINDOW)
    golden = torch.tensor(run["masked_per_layer_head"])
    threshold = CONFIGS[run["config"]][1]
    doubtful = ((result.scores[: length - WINDOW] - threshold).abs() < NEAR).sum(dim=0)
    assert ((counts - golden).abs() <= doubtful).all()
    assert (doubtful == 0).sum() > golden.numel() // 2
    assert counts.double().mean().item() / length == pytest.approx(run["ratio"], abs=1e-4)
