"""Prompts of real prose: what a press keeps depends on the text, random tokens are pruned differently."""

from __future__ import annotations

import random
from pathlib import Path

from transformers import AutoTokenizer

PROSE = Path(__file__).parents[1] / "examples" / "handbook.md"


def prose_prompts(model: str, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` tokens: the handbook's paragraphs in an order of their own each.

    No two share a prefix worth caching. `model`: folder of the tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    paragraphs = [tokenizer(text + "\n\n")["input_ids"] for text in PROSE.read_text().split("\n\n") if text.strip()]
    rng = random.Random(seed)
    prompts = []
    for index in range(count):
        prompt: list[int] = tokenizer(f"Chapter {seed}.{index}\n\n")["input_ids"]
        while len(prompt) < length:
            prompt += [token for paragraph in rng.sample(paragraphs, len(paragraphs)) for token in paragraph]
        prompts.append(prompt[:length])
    return prompts
