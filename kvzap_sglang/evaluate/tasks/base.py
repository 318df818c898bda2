"""What a task is."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvzap_sglang.evaluate.errors import EvaluationError
from kvzap_sglang.evaluate.example import Example, frame_tokens
from kvzap_sglang.evaluate.haystack import Haystack, hide


@dataclass(frozen=True)
class Sizes:
    """length: tokens of a context. contexts: how many. questions: of each context, where the task asks several. seed.

    depths: between which needles are hidden, 0 the start of the text and 1 its end.
    """

    length: int
    contexts: int
    questions: int
    seed: int
    depths: tuple[float, float] = (0.0, 1.0)


class Task(Protocol):
    """Makes examples; the same sizes, tokenizer and haystack make the same ones."""

    def examples(self, tokenizer: Any, sizes: Sizes, haystack: Haystack) -> list[Example]: ...


def context_rngs(name: str, sizes: Sizes) -> Iterator[random.Random]:
    """For each context of a task its own source of chance, whatever the number of contexts."""
    for index in range(sizes.contexts):
        yield random.Random(f"{name} {sizes.length} {sizes.seed} {index}")


def context_with(
    needles: Sequence[str],
    *,
    name: str,
    instruction: str,
    tokenizer: Any,
    sizes: Sizes,
    haystack: Haystack,
    rng: random.Random,
) -> tuple[str, list[float]]:
    """Instruction and haystack with the needles hidden in it, of the length asked for; and each needle's depth.

    Raises EvaluationError when they do not fit.
    """
    tokens = sizes.length - frame_tokens(tokenizer, instruction)
    try:
        text, depths = hide(tokenizer, haystack, rng, needles, tokens, sizes.depths)
    except ValueError as error:
        raise EvaluationError(f"--length {sizes.length}, task {name}: {error}. Give a longer one.") from error
    return instruction + text, depths
