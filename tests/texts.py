"""Real text for prompts: SGLang's and Python's own documentation strings, tokenised with the model's tokenizer."""

from __future__ import annotations

import inspect
import json
import logging.handlers
import subprocess
import textwrap
from functools import lru_cache

from transformers import AutoTokenizer

from tests.servers import model_path

MODULES = (inspect, json, logging.handlers, subprocess, textwrap)


@lru_cache(maxsize=1)
def text_tokens() -> list[int]:
    """Token ids of a few standard library modules' sources (PSF licence), one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(model_path("SmolLM2-135M-Instruct"))
    return list(tokenizer("\n\n".join(inspect.getsource(module) for module in MODULES))["input_ids"])


def real_text_prompts(count: int, length: int) -> list[list[int]]:
    """`count` different stretches of `length` tokens."""
    ids = text_tokens()
    stride = (len(ids) - length) // count
    if stride < 1:
        raise ValueError(f"{len(ids)} tokens are too few for {count} prompts of {length}")
    return [ids[i * stride : i * stride + length] for i in range(count)]
