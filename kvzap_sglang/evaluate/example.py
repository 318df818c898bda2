"""One question over one context, and the token ids under which a server sees them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

_CONTEXT_END = "\x00kvzap-context-ends\x00"  # no tokenizer's template writes it


@dataclass(frozen=True)
class Example:
    """What is asked, and what is right.

    `key`: unique and stable over runs (task, length, seed, index). `context`: the text that is cached and pruned;
    examples with the same `context` share its prefix. `question`: asked over it. `answer_prefix`: what the answer is
    made to start with ("" for none). `answers`: accepted or required strings, as `metric` (a name in `metrics.py`)
    reads them. `depth`: where in the context the answer lies, 0 its start and 1 its end; None if not at one place.
    `caches`: the context is sent before and found in the cache; if not, it is the prompt's first part only. `length`:
    tokens asked for, of generated contexts. `chat`: whether the model's chat template goes around. `history`: (role,
    content) of the messages before the user's, which holds context and question; part of what is cached.
    """

    key: str
    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    answer_prefix: str = ""
    depth: float | None = None
    caches: bool = True
    length: int = 0
    chat: bool = True
    history: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> str:
        """Of everything that is asked and expected."""
        return _digest(self)

    @property
    def context_name(self) -> str:
        """Under which a context's prefix is shared: with its own questions, and not with a context that begins alike.

        Such a one would be prefilled over the other's pruned start, which is how servers gain, but not what is measured
        here.
        """
        return _digest((self.history, self.context)) if self.caches else self.key


class Rendered(NamedTuple):
    """Token ids of the pruned prefix and of what follows it; their concatenation is the prompt."""

    context_ids: list[int]
    question_ids: list[int]


def render(tokenizer: Any, example: Example) -> Rendered:
    """Token ids by the model's chat template: after the history one user message, context then question.

    The two parts are tokenised apart, so that every question over a context continues the very same prefix (kvpress'
    pipeline does so too). A tokenizer without a chat template gets the bare text.
    """
    text = f"{example.context}{_CONTEXT_END}{example.question}"
    chat = example.chat and tokenizer.chat_template
    if chat:
        said = [*example.history, ("user", text)]
        messages = [{"role": role, "content": content} for role, content in said]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    context, question = text.split(_CONTEXT_END)
    ids = [
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in (context, question + example.answer_prefix)
    ]
    if not chat and tokenizer.bos_token_id is not None:
        ids[0] = [tokenizer.bos_token_id, *ids[0]]
    return Rendered(*ids)


def frame_tokens(tokenizer: Any, instruction: str) -> int:
    """Tokens of a context beside its text: the chat template's and the instruction's."""
    return len(render(tokenizer, Example("", "", instruction, "", (), "", 0)).context_ids)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
