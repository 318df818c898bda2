"""The converted SmolLM2 and the tiny random models are what they claim to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tiny = pytest.importorskip("kvzap_sglang_cpu.tiny", reason="kvzap-sglang-cpu is installed on CPUs only")

NAME = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def tokenizer(models: Path) -> Any:
    return AutoTokenizer.from_pretrained(models / NAME)


def test_tokenizer_has_the_original_special_tokens(tokenizer: Any) -> None:
    assert len(tokenizer) == 49152
    special = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    assert special == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("<|im_start|>user") == [1, *tokenizer.encode("user")]


def test_tokenizer_splits_numbers_into_digits_and_round_trips(tokenizer: Any) -> None:
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]
    text = "In 2024, naïve café: 3.14 ≈ π\n\tdef f(x): return x"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_frames_every_message(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("suffix", "dtype"), [("", torch.bfloat16), ("-fp32", torch.float32)])
def test_greedy_continuation_knows_the_capital_of_france(models: Path, tokenizer: Any, suffix: str, dtype: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(models / f"{NAME}{suffix}", dtype="auto")
    assert model.dtype == dtype
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(output[0, ids.shape[1] :]) == " Paris"


@pytest.mark.parametrize(("folder", "architecture"), [
    (NAME, "LlamaForCausalLM"),
    ("tiny-llama-random", "LlamaForCausalLM"),
    ("tiny-qwen3-random", "Qwen3ForCausalLM"),
])  # fmt: skip
def test_configuration_is_that_of_an_ordinary_checkpoint(models: Path, folder: str, architecture: str) -> None:
    config = json.loads((models / folder / "config.json").read_text())
    assert config["architectures"] == [architecture]
    assert config["max_position_embeddings"] == 8192
    assert not {"quantization_config", "_name_or_path"} & config.keys()
    if folder == NAME:
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
        assert config["rms_norm_eps"] == 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tiny_models_have_fixed_weights_and_leave_the_generator_alone(models: Path, family: str) -> None:
    state = torch.random.get_rng_state()
    built = tiny.build(family).state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    saved = AutoModelForCausalLM.from_pretrained(models / f"tiny-{family}-random", dtype="auto").state_dict()
    assert built.keys() == saved.keys()
    for name, weight in built.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, saved[name]), name
    assert built["model.layers.1.self_attn.k_proj.weight"].shape == (2 * 16, 64)
    assert 0.15 < built["model.embed_tokens.weight"].std() < 0.25


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown family 'gpt2'"):
        tiny.build("gpt2")
