"""Greedy runs of NVIDIA's kvpress on SmolLM2-135M-Instruct with the shipped surrogates: `tests/data/kvpress_smollm2.json`.

kvpress wants an older transformers than SGLang, so it runs in an environment of its own:

    python -m venv kvpress && kvpress/bin/pip install kvpress==0.5.5
    PYTHONPATH=. kvpress/bin/python scripts/kvpress_goldens.py
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from kvpress import DMSPress, KVzapPress
from kvpress.presses.kvzap_press import KVzapModel
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

ROOT = Path(__file__).resolve().parents[1]
MODEL = "SmolLM2-135M-Instruct"
OUT = ROOT / "tests" / "data" / "kvpress_smollm2.json"
NEW_TOKENS = 100
# Tokens of a prompt, and the document of corpus/haystack.jsonl (permissively licensed) that it begins.
PROMPTS = {300: 0, 700: 7, 1260: 21}
# kind of surrogate, threshold, whether generated tokens are pruned too
CONFIGS = [
    (None, -math.inf, False),
    ("mlp", -4.0, False),
    ("mlp", -4.0, True),
    ("linear", -3.0, True),
]


class LocalKVzap(KVzapPress):
    """kvpress' press, with a surrogate from a folder in place of the hub."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.kvzap_model = KVzapModel.from_pretrained(folder)

    def post_init_from_model(self, model: Any) -> None:
        """Nothing is to be downloaded."""


@torch.no_grad()
def run(model: Any, prompt: list[int], kind: str | None, threshold: float, decoding: bool) -> dict[str, Any]:
    """One greedy run. Margins: of the two highest logits, before each output token."""
    press = None
    if kind is not None:
        scorer = LocalKVzap(ROOT / "kvzap_sglang" / "surrogates" / f"KVzap-{kind}-{MODEL}")
        press = DMSPress(scorer, threshold=threshold, sliding_window_size=128, decoding=decoding)
    cache, ids, outputs, margins = DynamicCache(), torch.tensor([prompt]), [], []
    with press(model) if press else nullcontext():
        for _ in range(NEW_TOKENS):
            best = model(ids, past_key_values=cache).logits[0, -1].topk(2)
            outputs.append(int(best.indices[0]))
            margins.append(round(float(best.values[0] - best.values[1]), 4))
            ids = best.indices[None, :1]
    masked = [_masked(layer.self_attn, model.config.num_key_value_heads) for layer in model.model.layers]
    return {
        "kind": kind,
        "threshold": None if press is None else threshold,
        "decoding": decoding,
        "prompt_ids": prompt,
        "output_ids": outputs,
        "top2_margin": margins,
        "masked": None if press is None else masked,
    }


def _masked(module: Any, heads: int) -> list[int]:
    """Masked keys of each head."""
    indices = module.masked_key_indices
    return [0] * heads if indices is None else torch.bincount(indices[1], minlength=heads).tolist()


def main() -> None:
    folder = ROOT / "models" / MODEL
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    texts = [json.loads(line)["text"] for line in (ROOT / "corpus" / "haystack.jsonl").read_text().splitlines()]
    runs = [
        run(model, tokenizer(texts[document])["input_ids"][:length], *config)
        for length, document in PROMPTS.items()
        for config in CONFIGS
    ]
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text("[\n" + ",\n".join(json.dumps(each) for each in runs) + "\n]\n")


if __name__ == "__main__":
    main()
