"""Questions about one of many paragraphs (RULER's QA): the paragraphs are the user's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvzap_sglang.evaluate.errors import EvaluationError
from kvzap_sglang.evaluate.example import Example, frame_tokens
from kvzap_sglang.evaluate.haystack import Haystack, token_counts
from kvzap_sglang.evaluate.tasks.base import Sizes
from kvzap_sglang.evaluate.tasks.files import read_rows

_INSTRUCTION = "Answer the question from the documents below.\n\n"
FLAG = "--qa"


@dataclass(frozen=True)
class Paragraphs:
    """`file`: JSONL rows `{"paragraph", "question", "answers": [...]}` (SQuAD's, flattened)."""

    file: Path
    name: str = "qa"

    def examples(self, tokenizer: Any, sizes: Sizes, haystack: Haystack) -> list[Example]:
        """Contexts of the paragraphs of `sizes.questions` rows and as many others as fit. Raises EvaluationError."""
        rows = list(read_rows(FLAG, self.file, ("paragraph", "question", "answers")))
        paragraphs = list(dict.fromkeys(str(row["paragraph"]) for row in rows))
        counts = dict(zip(paragraphs, token_counts(tokenizer, [f"{p}\n\n" for p in paragraphs]), strict=True))
        order = random.Random(f"{self.name} {sizes.seed}").sample(rows, len(rows))
        groups = [order[start : start + sizes.questions] for start in range(0, len(order), sizes.questions)]
        frame = frame_tokens(tokenizer, _INSTRUCTION)
        examples = []
        for index, group in enumerate(groups[: sizes.contexts]):
            examples += self._of_context(sizes, group, paragraphs, counts, index, frame)
        return examples

    def _of_context(
        self,
        sizes: Sizes,
        group: list[dict[str, Any]],
        paragraphs: list[str],
        counts: dict[str, int],
        index: int,
        frame: int,
    ) -> list[Example]:
        rng = random.Random(f"{self.name} {sizes.length} {sizes.seed} {index}")
        chosen = list(dict.fromkeys(str(row["paragraph"]) for row in group))
        room = sizes.length - frame - sum(counts[p] for p in chosen)
        if room < 0:
            raise EvaluationError(
                f"--length {sizes.length}, task {self.name}: {len(chosen)} paragraphs do not fit. Give a longer one, or fewer --questions."
            )
        for paragraph in rng.sample(paragraphs, len(paragraphs)):
            if paragraph not in chosen and counts[paragraph] <= room:
                chosen.append(paragraph)
                room -= counts[paragraph]
        rng.shuffle(chosen)
        return [
            Example(
                key=f"{self.name}-{sizes.length}-{sizes.seed}-{index}-{number}",
                task=self.name,
                length=sizes.length,
                context=_INSTRUCTION + "\n\n".join(chosen),
                question=f"\n\nQuestion: {row['question']}",
                answers=tuple(str(answer) for answer in row["answers"]),
                metric="contains_any",
                max_new_tokens=32,
                answer_prefix="Answer:",
                depth=round(chosen.index(str(row["paragraph"])) / max(1, len(chosen) - 1), 4),
            )
            for number, row in enumerate(group)
        ]
