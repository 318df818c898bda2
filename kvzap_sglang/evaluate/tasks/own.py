"""One's own prompts: no right answer is known, so the pruned model is compared with the unpruned one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvzap_sglang.evaluate.errors import EvaluationError
from kvzap_sglang.evaluate.example import Example
from kvzap_sglang.evaluate.haystack import Haystack
from kvzap_sglang.evaluate.tasks.base import Sizes
from kvzap_sglang.evaluate.tasks.files import read_rows

FLAG = "--own"
METRIC = "agreement"


@dataclass(frozen=True)
class Own:
    """`file`: JSONL rows `{"prompt"}`, with an optional `"context"` that is cached before it.

    Or `{"messages": [{"role", "content"}, ...]}`, the last of them the user's: what goes before it is cached.
    """

    file: Path
    new_tokens: int
    name: str = "own"

    def examples(self, tokenizer: Any, sizes: Sizes, haystack: Haystack) -> list[Example]:
        """All prompts. Raises EvaluationError."""
        rows = read_rows(FLAG, self.file, ())
        return [self._example(index, row) for index, row in enumerate(rows)]

    def _example(self, index: int, row: dict[str, Any]) -> Example:
        history, prompt = _messages(row, f"{FLAG} {self.file}, row {index + 1}")
        context = str(row.get("context", ""))
        return Example(
            key=f"{self.name}-{index}",
            task=self.name,
            context=context,
            question=prompt,
            answers=(),
            metric=METRIC,
            max_new_tokens=self.new_tokens,
            caches=bool(context or history),
            history=history,
        )


def _messages(row: dict[str, Any], where: str) -> tuple[tuple[tuple[str, str], ...], str]:
    """History and last user message of a row. Raises EvaluationError."""
    if "prompt" in row and "messages" not in row:
        return (), str(row["prompt"])
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise EvaluationError(f'{where}: give "prompt", or "messages" of {{"role", "content"}} with text in both.')
    if messages[-1]["role"] != "user" or {"prompt", "context"} & row.keys():
        raise EvaluationError(f'{where}: "messages" end with the user\'s, and stand without "prompt" and "context".')
    said = tuple((message["role"], message["content"]) for message in messages)
    return said[:-1], said[-1][1]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
