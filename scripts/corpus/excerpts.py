"""Whole paragraphs, as many as make a prompt."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from typing import Any

SHORTEST, LONGEST = 770, 1000  # tokens; calibration takes 750 to 1250, and cost grows with the length
MOST_PER_DOCUMENT = 2
_LINE_LIMIT = 4000  # characters: longer lines are data, not text


def excerpts(tokenizer: Any, text: str, name: str) -> Iterator[str]:
    """Up to two excerpts of a document, from places that its name decides."""
    blocks = [block for block in re.split(r"\n\s*\n", text) if block.strip() and len(block) < 4 * _LINE_LIMIT]
    if len(blocks) < 4 and len(text) < 1_000_000:
        blocks = text.splitlines()  # tables
    glue = "\n\n" if "\n\n" in text and len(blocks) >= 4 else "\n"
    blocks = [block for block in blocks if len(block) < _LINE_LIMIT]
    rng = random.Random(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
    lengths = [len(tokenizer(block + glue, add_special_tokens=False)["input_ids"]) for block in blocks[:4000]]
    starts, found = list(range(len(lengths))), 0
    cursor = 0 if sum(lengths) < 2 * LONGEST else rng.choice(starts[: max(1, len(starts) // 3)])
    while found < MOST_PER_DOCUMENT and cursor < len(lengths):
        aim, total, end = rng.randint(SHORTEST + 40, LONGEST - 60), 0, cursor
        while end < len(lengths) and total < aim:
            total += lengths[end]
            end += 1
        piece = glue.join(blocks[cursor:end]).strip("\n")
        if SHORTEST < len(tokenizer(piece.strip(), add_special_tokens=False)["input_ids"]) < LONGEST + 150:
            yield piece
            found += 1
        cursor = end if end > cursor else cursor + 1


def is_monotonous(text: str) -> bool:
    """Whether few distinct words or lines make up most of it."""
    words, lines = text.split(), [line for line in text.splitlines() if line.strip()]
    return len(set(words)) < 0.18 * len(words) or len(set(lines)) < 0.5 * len(lines)
