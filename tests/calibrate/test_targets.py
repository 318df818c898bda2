"""Repeat prompts and their scores, against a dense computation straight from the formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvzap_sglang.calibrate.prompts import RepeatPrompt, repeat_prompt
from kvzap_sglang.calibrate.targets import record, repeat_targets
from tests.calibrate.dense_targets import dense_targets
from tests.servers import model_path

HANDBOOK = (Path(__file__).parents[2] / "examples" / "handbook.md").read_text()


def load(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path(name), dtype=torch.float32).eval()


@pytest.mark.parametrize("text", ["  Two lines.\nOf text, and Ünïcode. ", HANDBOOK[:900]])
def test_the_text_stands_twice(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path("SmolLM2-135M-Instruct"))
    prompt = repeat_prompt(tokenizer, text)
    decoded = tokenizer.decode(prompt.ids)
    assert decoded.count(text.strip()) == 2 and "Repeat the previous context exactly." in decoded
    spans = [prompt.ids[span.start : span.stop] for span in (prompt.context, prompt.repeated)]
    assert [tokenizer.decode(span) for span in spans] == [text.strip()] * 2
    assert prompt.context.stop < prompt.repeated.start


@pytest.mark.parametrize("name", ["tiny-llama-random", "tiny-qwen3-random"])
@pytest.mark.parametrize("plus", [True, False])
def test_scores_are_those_of_the_formula(name: str, plus: bool) -> None:
    """Lengths around the block of rows, and a head group of more than one."""
    model = load(name)
    for tokens in (1, 127, 128, 129, 300):
        ids = torch.randint(3, 200, (tokens,)).tolist()
        prompt = RepeatPrompt([1, 5, *ids, 7, *ids, 9], range(2, 2 + tokens), range(3 + tokens, 3 + 2 * tokens))
        torch.testing.assert_close(
            repeat_targets(model, prompt, plus), dense_targets(model, prompt, plus), atol=1e-5, rtol=0
        )
    assert model.config._attn_implementation != "kvzap_lent"


@pytest.mark.parametrize("text", [HANDBOOK[1000:1900], (Path(__file__)).read_text()[:900]])
def test_scores_of_the_real_model_and_what_is_recorded(text: str) -> None:
    """Within 1e-5 where the forward pass rounds in float64. In fp32 two attention implementations, each as far from

    that as the other (1.7e-5 at most on one of these prompts), differ by their own rounding through thirty layers.
    """
    folder = model_path("SmolLM2-135M-Instruct-fp32")
    prompt = repeat_prompt(AutoTokenizer.from_pretrained(folder), text)
    model = load("SmolLM2-135M-Instruct-fp32").double()
    dense = dense_targets(model, prompt, True)
    torch.testing.assert_close(repeat_targets(model, prompt).double(), dense.double(), atol=1e-5, rtol=0)
    seen = record(model.float(), prompt)
    difference = (torch.stack(seen.targets, 1).double() - dense).abs()
    assert difference.max() < 1e-4 and difference.mean() < 1e-5
    embedded = model.get_input_embeddings()(torch.tensor(prompt.ids)[list(prompt.context)])
    torch.testing.assert_close(seen.hidden[0], model.base_model.layers[0].input_layernorm(embedded))


def test_a_model_with_sliding_windows_is_refused() -> None:
    model = load("tiny-llama-random")
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="sliding_attention"):
        repeat_targets(model, RepeatPrompt([1, 2, 3], range(1), range(1, 2)))
