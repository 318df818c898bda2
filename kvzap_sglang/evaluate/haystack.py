"""The text that hides a needle."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvzap_sglang.calibrate.corpus import read_corpus
from kvzap_sglang.evaluate.errors import EvaluationError

_FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. The road runs along the "
    "river. A boat is tied to the pier. The bell rings at noon. Rain is falling on the roof. The market opens early."
)
_DRAWN_AT_ONCE = 64  # sentences between two looks at the length
_FITTING_STEPS = 6

Text = TypeVar("Text", bound=tuple[Any, ...])  # the text comes first


class Haystack:
    """Sentences in the order of their documents.

    `paths`: text or JSONL files or folders of them; without any, a few sentences that are repeated (RULER's "noise").
    Raises CalibrationError for files that cannot be read.
    """

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        texts = [document.text for document in read_corpus(paths)] if paths else [_FILLER]
        self.documents = [sentences for text in texts if (sentences := split_sentences(text))]
        self.repeats = not paths
        if not self.documents:
            raise EvaluationError(
                f"--haystack {' '.join(map(str, paths))}: there is no sentence in it. Give other text."
            )

    def draw(self, tokenizer: Any, rng: random.Random, tokens: int) -> list[str]:
        """Successive sentences of at least `tokens` tokens, from a random place on through random documents."""
        drawn: list[str] = []
        total = 0
        while total < tokens:
            document = rng.choice(self.documents)
            start = 0 if self.repeats or total else rng.randrange(max(1, len(document) - _DRAWN_AT_ONCE))
            for block in range(start, len(document), _DRAWN_AT_ONCE):
                sentences = document[block : block + _DRAWN_AT_ONCE]
                drawn += sentences
                total += sum(token_counts(tokenizer, sentences))
                if total >= tokens:
                    break
        return drawn


def split_sentences(text: str) -> list[str]:
    """Sentences, each with what separates it from the next one."""
    return [part for part in re.findall(r".+?(?:[.!?][^\w\s]*\s+|\n\s*|\Z)", text, flags=re.DOTALL) if part.strip()]


def token_counts(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Tokens of each text by itself."""
    return [len(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]] if texts else []


def fitted(tokenizer: Any, tokens: int, build: Callable[[int], Text]) -> Text:
    """`build(size)` for a size at which its text has about `tokens` tokens.

    Sizes are tokens of parts; where parts meet tokens merge or split, which only the whole text shows.
    """
    size = tokens
    for _ in range(_FITTING_STEPS):
        built = build(size)
        (count,) = token_counts(tokenizer, [built[0]])
        if abs(count - tokens) <= tokens // 200:
            break
        size = max(1, size + tokens - count)
    return built


def hide(
    tokenizer: Any,
    haystack: Haystack,
    rng: random.Random,
    needles: Sequence[str],
    tokens: int,
    between: tuple[float, float] = (0.0, 1.0),
) -> tuple[str, list[float]]:
    """A text of about `tokens` tokens with the needles between its sentences, and the depth of each (0 start, 1 end).

    One needle in each of equally long stretches `between` two depths, in the order given. Raises ValueError when they
    leave no room.
    """
    taken = sum(token_counts(tokenizer, needles))
    if tokens - taken < len(needles):
        raise ValueError(f"{tokens} tokens have no room for {len(needles)} needles")
    sentences = haystack.draw(tokenizer, rng, int(1.3 * tokens))
    counts = token_counts(tokenizer, sentences)
    low, high = between
    spots = [low + (high - low) * (index + rng.random()) / len(needles) for index in range(len(needles))]

    def build(size: int) -> tuple[str, list[float]]:
        parts = _shortened(sentences, counts, max(1, size - taken))
        places = [int(len(parts) * spot) for spot in spots]
        depths = [sum(map(len, parts[:place])) / max(1, sum(map(len, parts))) for place in places]
        for place, needle in reversed(list(zip(places, needles, strict=True))):
            parts.insert(place, needle + " ")
        return "".join(parts).strip(), [round(depth, 4) for depth in depths]

    return fitted(tokenizer, tokens, build)


def _shortened(sentences: list[str], counts: list[int], tokens: int) -> list[str]:
    """The first sentences, the last of them cut, of `tokens` tokens together."""
    parts: list[str] = []
    left = tokens
    for sentence, count in zip(sentences, counts, strict=True):
        if count > left:
            words = sentence.split(" ")
            sentence = " ".join(words[: len(words) * left // count])
        if sentence:
            parts.append(sentence if sentence[-1].isspace() else sentence + " ")
        left -= count
        if left <= 0:
            break
    return parts
