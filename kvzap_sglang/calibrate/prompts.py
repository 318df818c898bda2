"""The repeat prompt: a text, the request to repeat it, and the text again (KVzip, arXiv 2505.23416)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INSTRUCTION = "\n\nRepeat the previous context exactly."


@dataclass(frozen=True)
class RepeatPrompt:
    """Token ids of the extended prompt; `context` and `repeated` are where the text stands the first and the second time."""

    ids: list[int]
    context: range
    repeated: range


def repeat_prompt(tokenizer: Any, text: str) -> RepeatPrompt:
    """The extended prompt of `text`, by the chat template if there is one (kvpress' `kvzap/data.py`).

    The two ranges begin at the first token that starts at or after the text, and end before the first one that starts
    at or after its end. Raises ValueError for a tokenizer without character offsets.
    """
    if not tokenizer.is_fast:
        raise ValueError("the tokenizer gives no character offsets: a fast one (tokenizer.json) is needed")
    text = text.strip()
    rendered = _render(tokenizer, text)
    encoded = tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in encoded["offset_mapping"]]
    first, last = rendered.find(text), rendered.rfind(text)
    return RepeatPrompt(
        encoded["input_ids"], _token_range(starts, first, len(text)), _token_range(starts, last, len(text))
    )


def _render(tokenizer: Any, text: str) -> str:
    if not tokenizer.chat_template:
        return f"{tokenizer.bos_token or ''}{text}{INSTRUCTION}\n\n{text}"
    messages = [{"role": "user", "content": text + INSTRUCTION}, {"role": "assistant", "content": text}]
    rendered: str = tokenizer.apply_chat_template(messages, tokenize=False)
    return rendered


def _token_range(starts: list[int], begin: int, length: int) -> range:
    first = next(index for index, start in enumerate(starts) if start >= begin)
    last = next((index for index, start in enumerate(starts) if start >= begin + length), len(starts))
    return range(first, last)
