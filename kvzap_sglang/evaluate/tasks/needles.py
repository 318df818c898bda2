"""Needles in a haystack (RULER, arXiv 2404.06654): one key, many keys, several values of a key, several keys at once."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from kvzap_sglang.evaluate.errors import EvaluationError
from kvzap_sglang.evaluate.example import Example
from kvzap_sglang.evaluate.haystack import Haystack
from kvzap_sglang.evaluate.tasks.base import Sizes, context_rngs, context_with

_INSTRUCTION = "Secret numbers are hidden in the following text. Remember them.\n\n"
# Words of one token or two, so that keys cost what they should and differ at their first token.
_KEY_WORDS = """
amber anchor apple arrow autumn badge barn basket beach bell berry bishop blanket bottle branch bread bridge
brush bucket butter cabin camel candle canyon carpet castle cedar cherry circle clover coffee copper coral
cotton cradle crystal curtain desert diamond dolphin dragon eagle ember engine falcon feather fiddle forest
fountain garden ginger glacier granite hammer harbor hazel helmet honey island ivory jacket jungle kettle ladder
lantern lemon lily lizard magnet maple marble meadow mirror mountain needle nickel oasis ocean olive onion
orange orchid oyster paddle palace panther pearl pepper piano pigeon pillow planet pocket prairie prism pumpkin
quarry rabbit raven ribbon river rocket saddle salmon sapphire shadow silver spider spoon spruce stable summer
sunset tailor temple thunder tiger timber tulip tunnel turtle valley velvet violet walnut whistle willow window
winter wizard yellow zebra
"""
KEYS = _KEY_WORDS.split()


@dataclass(frozen=True)
class Needles:
    """`values` per key; a question asks for `asked` keys.

    `single`: one context holds one key and is asked once; else a context holds the keys of all its questions.
    """

    name: str
    values: int = 1
    asked: int = 1
    single: bool = False

    def examples(self, tokenizer: Any, sizes: Sizes, haystack: Haystack) -> list[Example]:
        """Raises EvaluationError when the needles do not fit the length."""
        return [
            example
            for index, rng in enumerate(context_rngs(self.name, sizes))
            for example in self._of_context(tokenizer, sizes, haystack, rng, index)
        ]

    def _of_context(
        self, tokenizer: Any, sizes: Sizes, haystack: Haystack, rng: random.Random, index: int
    ) -> list[Example]:
        questions = 1 if self.single else sizes.questions
        if questions * self.asked > len(KEYS):
            raise EvaluationError(f"--questions {questions}, task {self.name}: at most {len(KEYS) // self.asked}.")
        keys = rng.sample(KEYS, questions * self.asked)
        values = {key: [str(rng.randrange(10000, 100000)) for _ in range(self.values)] for key in keys}
        needles = [(key, f"The secret number of {key} is {value}.") for key in keys for value in values[key]]
        rng.shuffle(needles)
        context, depths = context_with(
            [needle for _, needle in needles],
            name=self.name,
            instruction=_INSTRUCTION,
            tokenizer=tokenizer,
            sizes=sizes,
            haystack=haystack,
            rng=rng,
        )
        where = {key: depth for (key, _), depth in zip(needles, depths, strict=True)}
        asked = [keys[start : start + self.asked] for start in range(0, len(keys), self.asked)]
        return [
            Example(
                key=f"{self.name}-{sizes.length}-{sizes.seed}-{index}-{number}",
                task=self.name,
                length=sizes.length,
                context=context,
                question=self._question(group),
                answers=tuple(value for key in group for value in values[key]),
                metric="contains_all",
                max_new_tokens=8 * self.values * self.asked + 2,
                answer_prefix=self._answer_prefix(group),
                depth=where[group[0]] if self.values * self.asked == 1 else None,
            )
            for number, group in enumerate(asked)
        ]

    def _question(self, keys: list[str]) -> str:
        if self.values > 1:
            return f"\n\nWhat are all the secret numbers of {keys[0]} in the text?"
        return f"\n\nWhat {'is the secret number' if len(keys) == 1 else 'are the secret numbers'} of {_listed(keys)}?"

    def _answer_prefix(self, keys: list[str]) -> str:
        if self.values * self.asked == 1:
            return f"The secret number of {keys[0]} is"
        return f"The secret numbers of {_listed(keys)} are"


def _listed(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"


SINGLE = Needles("needle-single", single=True)
MULTI_KEY = Needles("needle-multikey")
MULTI_VALUE = Needles("needle-multivalue", values=3)
MULTI_QUERY = Needles("needle-multiquery", asked=3)
