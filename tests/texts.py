"""Real text for prompts: SGLang's and Python's own documentation strings, tokenised with the model's tokenizer."""

from __future__ import annotations

import inspect
import json
import logging.handlers
import subprocess
import textwrap
from functools import lru_cache
from pathlib import Path

from transformers import AutoTokenizer

from tests.servers import model_path

MODULES = (inspect, json, logging.handlers, subprocess, textwrap)


@lru_cache(maxsize=1)
def text_tokens() -> list[int]:
    """Token ids of a few standard library modules' sources (PSF licence), one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(model_path("SmolLM2-135M-Instruct"))
    return list(tokenizer("\n\n".join(inspect.getsource(module) for module in MODULES))["input_ids"])


@lru_cache(maxsize=1)
def prose_tokens() -> list[int]:
    """Token ids of the example's handbook: prose, of which the development surrogate keeps about a third at -3."""
    tokenizer = AutoTokenizer.from_pretrained(model_path("SmolLM2-135M-Instruct"))
    return list(tokenizer((Path(__file__).parents[1] / "examples" / "handbook.md").read_text())["input_ids"])


def prose_prompts(count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` tokens that start at different places of the handbook, read as a ring."""
    ring = prose_tokens() * 2
    stride = len(ring) // 2 // count
    if stride < 1 or length > len(ring) // 2:
        raise ValueError(f"a handbook of {len(ring) // 2} tokens is too short for {count} prompts of {length}")
    return [ring[i * stride : i * stride + length] for i in range(count)]


def real_text_prompts(count: int, length: int) -> list[list[int]]:
    """`count` different stretches of `length` tokens."""
    ids = text_tokens()
    stride = (len(ids) - length) // count
    if stride < 1:
        raise ValueError(f"{len(ids)} tokens are too few for {count} prompts of {length}")
    return [ids[i * stride : i * stride + length] for i in range(count)]
