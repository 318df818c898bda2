"""Variable tracking (RULER): which names hold a value after chains of assignments."""

from __future__ import annotations

import random
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from kvzap_sglang.evaluate.example import Example
from kvzap_sglang.evaluate.haystack import Haystack
from kvzap_sglang.evaluate.tasks.base import Sizes, context_rngs, context_with

_INSTRUCTION = "Assignments to variables are hidden in the following text. Follow them.\n\n"
_NAME_LETTERS = 4


@dataclass(frozen=True)
class Tracking:
    """A question of every context follows one chain of `hops` copies; the other chains distract."""

    hops: int = 2
    name: str = "variable-tracking"

    def examples(self, tokenizer: Any, sizes: Sizes, haystack: Haystack) -> list[Example]:
        """Raises EvaluationError when the chains do not fit the length."""
        return [
            example
            for index, rng in enumerate(context_rngs(self.name, sizes))
            for example in self._of_context(tokenizer, sizes, haystack, rng, index)
        ]

    def _of_context(
        self, tokenizer: Any, sizes: Sizes, haystack: Haystack, rng: random.Random, index: int
    ) -> list[Example]:
        names = _names(rng, sizes.questions * (self.hops + 1))
        chains = [names[start : start + self.hops + 1] for start in range(0, len(names), self.hops + 1)]
        values = rng.sample(range(10000, 100000), len(chains))
        # Chains are woven together, each in its own order: an assignment stands after the one that it copies.
        order = [chain for chain in range(len(chains)) for _ in range(self.hops + 1)]
        rng.shuffle(order)
        done = [0] * len(chains)
        needles = []
        for chain in order:
            step, variables = done[chain], chains[chain]
            source = str(values[chain]) if step == 0 else f"VAR {variables[step - 1]}"
            needles.append(f"VAR {variables[step]} = {source}.")
            done[chain] += 1
        context, _ = context_with(
            needles,
            name=self.name,
            instruction=_INSTRUCTION,
            tokenizer=tokenizer,
            sizes=sizes,
            haystack=haystack,
            rng=rng,
        )
        return [
            Example(
                key=f"{self.name}-{sizes.length}-{sizes.seed}-{index}-{number}",
                task=self.name,
                length=sizes.length,
                context=context,
                question=f"\n\nWhich variables have the value {value}? There are {self.hops + 1}.",
                answers=tuple(variables),
                metric="contains_all",
                max_new_tokens=12 * (self.hops + 1),
                answer_prefix=f"The variables with the value {value} are",
            )
            for number, (variables, value) in enumerate(zip(chains, values, strict=True))
        ]


def _names(rng: random.Random, count: int) -> list[str]:
    names: set[str] = set()
    while len(names) < count:
        names.add("".join(rng.choices(ascii_uppercase, k=_NAME_LETTERS)))
    return rng.sample(sorted(names), count)


TRACKING = Tracking()
