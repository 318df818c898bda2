"""Common and frequent words (RULER): what a list repeats, which takes all of the context and not one place in it."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from typing import Any

from kvzap_sglang.evaluate.errors import EvaluationError
from kvzap_sglang.evaluate.example import Example, frame_tokens
from kvzap_sglang.evaluate.haystack import Haystack, fitted
from kvzap_sglang.evaluate.tasks.base import Sizes, context_rngs

_INSTRUCTION = "The following is a list of words. Remember which ones come up most often.\n\n"
_FEWEST = 60  # words: fewer make no list
_TOKENS_PER_WORD = 3.5  # a first guess, for random letters


@dataclass(frozen=True)
class Words:
    """`answers` words stand out: ten times as frequent as the others, or, if `zipf`, the first ones of a Zipf law."""

    name: str
    answers: int
    zipf: bool

    def examples(self, tokenizer: Any, sizes: Sizes, haystack: Haystack) -> list[Example]:
        """One question a context. Raises EvaluationError for a length without room for a list."""
        return [
            self._of_context(tokenizer, sizes, rng, index) for index, rng in enumerate(context_rngs(self.name, sizes))
        ]

    def _of_context(self, tokenizer: Any, sizes: Sizes, rng: random.Random, index: int) -> Example:
        vocabulary = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(40)]
        weights = [
            1 / (rank + 1) ** 1.5 if self.zipf else (10.0 if rank < self.answers else 1.0)
            for rank in range(len(vocabulary))
        ]
        weight_of = dict(zip(vocabulary, weights, strict=True))
        tokens = sizes.length - frame_tokens(tokenizer, _INSTRUCTION)

        def build(size: int) -> tuple[str, int]:
            # Exact shares, not draws: the answer may not depend on luck.
            total = size / _TOKENS_PER_WORD
            listed = [word for word in vocabulary for _ in range(max(1, round(total * weight_of[word] / sum(weights))))]
            random.Random(index).shuffle(listed)
            return " ".join(listed), len(listed)

        text, count = fitted(tokenizer, tokens, build)
        if count < _FEWEST:
            raise EvaluationError(
                f"--length {sizes.length}, task {self.name}: room for {count} words. Give a longer one."
            )
        kind = "frequent" if self.zipf else "common"
        return Example(
            key=f"{self.name}-{sizes.length}-{sizes.seed}-{index}-0",
            task=self.name,
            length=sizes.length,
            context=_INSTRUCTION + text,
            question=f"\n\nWhat are the {self.answers} most {kind} words in the list?",
            answers=tuple(vocabulary[: self.answers]),
            metric="contains_all",
            max_new_tokens=8 * self.answers,
            answer_prefix=f"The {self.answers} most {kind} words are",
        )


COMMON_WORDS = Words("common-words", answers=10, zipf=False)
FREQUENT_WORDS = Words("frequent-words", answers=3, zipf=True)
