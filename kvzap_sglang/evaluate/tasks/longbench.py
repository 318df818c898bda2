"""LongBench (arXiv 2308.14508) from a local copy of its official files, with its official metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvzap_sglang.evaluate.errors import EvaluationError
from kvzap_sglang.evaluate.example import Example
from kvzap_sglang.evaluate.haystack import Haystack
from kvzap_sglang.evaluate.tasks.base import Sizes
from kvzap_sglang.evaluate.tasks.files import read_object, read_rows

FLAG = "--longbench"
# The English sets; the Chinese ones are scored after word segmentation, which needs a library of its own.
METRIC_OF = {
    "narrativeqa": "f1",
    "qasper": "f1",
    "multifieldqa_en": "f1",
    "hotpotqa": "f1",
    "2wikimqa": "f1",
    "musique": "f1",
    "triviaqa": "f1_first_line",
    "gov_report": "rouge_l",
    "qmsum": "rouge_l",
    "multi_news": "rouge_l",
    "samsum": "rouge_l_first_line",
    "trec": "classification_first_line",
    "passage_retrieval_en": "paragraph_number",
    "passage_count": "count",
    "lcc": "code_similarity",
    "repobench-p": "code_similarity",
}
_WITHOUT_CHAT = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
_FRAME_TOKENS = 500  # template, instruction and question
_UNKNOWN_LIMIT = 10**6  # tokenizers that know none say a very large number


@dataclass(frozen=True)
class LongBench:
    """`folder`: `data/<set>.jsonl`, `config/dataset2prompt.json` and `config/dataset2maxlen.json` as published.

    `longest`: tokens; the middle is cut out of a longer context, as the official script does. None: the tokenizer's limit.
    """

    folder: Path
    name: str
    longest: int | None

    def examples(self, tokenizer: Any, sizes: Sizes, haystack: Haystack) -> list[Example]:
        """The first `sizes.contexts` rows. Raises EvaluationError."""
        if self.name not in METRIC_OF:
            raise EvaluationError(f"--task longbench:{self.name}: unknown set. Known are {', '.join(METRIC_OF)}.")
        prompts = read_object(FLAG, self.folder / "config" / "dataset2prompt.json")
        lengths = read_object(FLAG, self.folder / "config" / "dataset2maxlen.json")
        before, _, after = str(prompts[self.name]).partition("{context}")
        rows = read_rows(FLAG, self.folder / "data" / f"{self.name}.jsonl", ("input", "context", "answers"))
        return [
            self._example(
                index, self._shortened(tokenizer, row, int(lengths[self.name])), before, after, int(lengths[self.name])
            )
            for index, row in zip(range(sizes.contexts), rows, strict=False)
        ]

    def _shortened(self, tokenizer: Any, row: dict[str, Any], new_tokens: int) -> dict[str, Any]:
        limit = self.longest
        if limit is None:
            limit = tokenizer.model_max_length - new_tokens - _FRAME_TOKENS
        ids = tokenizer(str(row["context"]), add_special_tokens=False)["input_ids"]
        if limit > _UNKNOWN_LIMIT or len(ids) <= limit:
            return row
        half = limit // 2
        return {**row, "context": tokenizer.decode(ids[:half]) + tokenizer.decode(ids[-half:])}

    def _example(self, index: int, row: dict[str, Any], before: str, after: str, new_tokens: int) -> Example:
        answers = [str(answer) for answer in row["answers"]]
        if METRIC_OF[self.name].startswith("classification"):
            answers = [answers[0], *map(str, row["all_classes"])]
        return Example(
            key=f"longbench-{self.name}-{index}",
            task=f"longbench:{self.name}",
            context=before.replace("{input}", str(row["input"])) + str(row["context"]),
            question=after.replace("{input}", str(row["input"])),
            answers=tuple(answers),
            metric=METRIC_OF[self.name],
            max_new_tokens=new_tokens,
            chat=self.name not in _WITHOUT_CHAT,
        )
