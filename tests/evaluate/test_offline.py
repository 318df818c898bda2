"""The offline evaluation equals the oracle, and its policies keep what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvzap_sglang.cli import main
from kvzap_sglang.evaluate.offline import policies
from kvzap_sglang.evaluate.offline.answer import answer
from kvzap_sglang.evaluate.offline.context import compute_context
from kvzap_sglang.evaluate.oracle import Turn, run_oracle
from kvzap_sglang.presses.surrogate import load_surrogate
from tests.servers import model_path
from tests.surrogates import make_surrogate

WINDOW = 16


@pytest.mark.parametrize("name", ["tiny-llama-random", "tiny-qwen3-random"])
def test_answers_are_the_oracles(name: str, tmp_path: Path) -> None:
    """Question and answer as one prompt over the pruned context: what kvpress does without `decoding`."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_path(name), dtype=torch.float32).eval()
    config = model.config
    folder = make_surrogate(
        tmp_path, hidden=config.hidden_size, layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads
    )
    surrogate = load_surrogate(str(folder), dtype=torch.float32, device="cpu")
    ids, question = torch.randint(3, 200, (90,)).tolist(), torch.randint(3, 200, (7,)).tolist()
    context = compute_context(model, ids)
    scores = torch.stack([surrogate.score(layer, hidden).T for layer, hidden in enumerate(context.hidden)])
    thresholds = (-torch.inf, -0.3, 0.4)
    kept = [policies.with_protected(policies.by_threshold(scores, t), WINDOW, 0) for t in thresholds]
    answers = answer(model, context, torch.stack(kept), question, 12, stops=())
    assert answers[0] != answers[2]
    for threshold, tokens in zip(thresholds, answers, strict=True):
        sequence = [*ids, *question, *tokens]
        turns = [Turn(len(ids), 0, len(ids)), Turn(len(sequence), len(ids), len(sequence))]
        seen = run_oracle(model, surrogate, sequence, turns, threshold=threshold, window=WINDOW)
        first = len(ids) + len(question) - 1
        assert seen.margins[first:-1].min() > 1e-4
        assert seen.argmax[first : first + 12].tolist() == tokens


def test_an_answer_ends_where_it_stops() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(model_path("tiny-llama-random"), dtype=torch.float32).eval()
    context = compute_context(model, list(range(5, 45)))
    kept = torch.ones(1, 2, 2, 40, dtype=torch.bool)
    (whole,) = answer(model, context, kept, [7, 8], 10, stops=())
    (cut,) = answer(model, context, kept, [7, 8], 10, stops={whole[4]})
    assert cut == whole[: whole.index(whole[4])]


@pytest.mark.parametrize("removed", [0.0, 0.4, 0.7])
def test_policies_remove_as_much_as_they_should(removed: float) -> None:
    scores = torch.randn(4, 3, 1000)
    top = policies.by_top_k(scores, removed, 128)
    assert ((~policies.with_protected(top, 128, 0)).double().mean(-1) - removed).abs().max() < 2e-3
    chance = policies.by_chance(scores.shape, removed, 128, 4, torch.Generator().manual_seed(0))
    assert (~policies.with_protected(chance, 128, 4)).double().mean() == pytest.approx(removed, abs=0.02)
    recent = policies.by_recency(scores.shape, removed, 4)
    assert (~recent).double().mean() == pytest.approx(removed, abs=2e-3) and recent[..., :4].all()


def test_top_k_takes_the_best_of_every_head() -> None:
    scores = torch.randn(2, 2, 50)
    kept = policies.by_top_k(scores, 0.6, 10)
    for layer in range(2):
        for head in range(2):
            best = scores[layer, head, :40].sort(descending=True).indices[:10]
            assert set(kept[layer, head].nonzero()[:, 0].tolist()) == set(best.tolist())


def test_the_command_writes_every_policy(tmp_path: Path) -> None:
    folder = make_surrogate(tmp_path / "S", hidden=64, layers=2, kv_heads=2)
    flags = ["--thresholds", "-0.5", "0.5", "--windows", "16", "0", "--sinks", "0", "4", "--kvzip"]
    sizes = ["--length", "260", "--contexts", "2", "--questions", "2"]
    command = [
        "ablate",
        "--model",
        model_path("tiny-llama-random"),
        "--surrogate",
        str(folder),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*command, *flags, *sizes]) == 0
    lines = {line["method"]: line for line in json.loads((tmp_path / "out" / "results.json").read_text())}
    assert len(lines) == 1 + 2 * (2 * 4 + 2) + 2 * 2
    assert all(line["examples"] == 4 for line in lines.values())
    assert lines["full"]["removed"] == 0.0
    for other in ("S top-k as -0.5", "random as S -0.5", "streaming as S -0.5"):
        assert lines[other]["removed"] == pytest.approx(lines["S -0.5, window 16, sinks 0"]["removed"], abs=0.03)
    answers = (tmp_path / "out" / "answers.jsonl").read_text()
    assert main([*command, *flags, *sizes]) == 0
    assert (tmp_path / "out" / "answers.jsonl").read_text() == answers
