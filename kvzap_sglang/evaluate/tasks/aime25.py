r"""AIME 2025 from a local copy: long reasoning, exact match on the last \boxed{} (kvpress' `evaluate_aime.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvzap_sglang.evaluate.example import Example
from kvzap_sglang.evaluate.haystack import Haystack
from kvzap_sglang.evaluate.tasks.base import Sizes
from kvzap_sglang.evaluate.tasks.files import read_rows

FLAG = "--aime25"
_INSTRUCTION = "Solve the problem and put the final answer, a whole number, in \\boxed{}.\n\n"


@dataclass(frozen=True)
class Aime25:
    """`file`: JSONL rows `{"problem", "answer"}`. `new_tokens`: room for the reasoning."""

    file: Path
    new_tokens: int
    name: str = "aime25"

    def examples(self, tokenizer: Any, sizes: Sizes, haystack: Haystack) -> list[Example]:
        """The first `sizes.contexts` problems. Raises EvaluationError."""
        rows = read_rows(FLAG, self.file, ("problem", "answer"))
        return [
            Example(
                key=f"{self.name}-{index}",
                task=self.name,
                context=_INSTRUCTION,
                question=str(row["problem"]),
                answers=(str(row["answer"]),),
                metric="boxed",
                max_new_tokens=self.new_tokens,
                caches=False,
            )
            for index, row in zip(range(sizes.contexts), rows, strict=False)
        ]
