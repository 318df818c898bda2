"""Tiny models with random weights for tests: a Llama and a Qwen3, two layers each, SmolLM2's tokenizer.

    python -m kvzap_sglang_cpu.tiny --out models

They start as fast as Python does, and fp32 weights of a wide spread (0.2) keep greedy ties away.
"""

from functools import partial
from pathlib import Path
from typing import Any

from . import smollm2
from .model_folder import command_line, pending, write_model_folder

SEED = 0
FOLDERS = {"tiny-llama-random": "llama", "tiny-qwen3-random": "qwen3"}
_SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}


def build(family: str) -> Any:
    """A `LlamaForCausalLM` ("llama") or `Qwen3ForCausalLM` ("qwen3") in fp32, the same for the same torch version.

    Raises ValueError for another family.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    classes = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    if family not in classes:
        raise ValueError(f"unknown family {family!r}, expected one of {sorted(classes)}")
    config_class, model_class = classes[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return model_class(config_class(**_SHAPE)).float()


def make(out: Path) -> list[Path]:
    """Write the folders of FOLDERS that are not complete under `out`; returns the ones written."""
    names = pending(out, FOLDERS)
    if not names:
        return []
    tokenizer = smollm2.load_tokenizer(smollm2.gguf_folder())
    written = []
    for name in names:
        write = partial(smollm2.save_model, build(FOLDERS[name]), tokenizer, "float32")
        if write_model_folder(out / name, write):
            written.append(out / name)
    return written


def main(argv: list[str] | None = None) -> None:
    """Command line: make what is missing under --out and say what was done."""
    command_line((__doc__ or "").splitlines()[0], FOLDERS, make, argv)


if __name__ == "__main__":
    main()
