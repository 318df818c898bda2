"""Comparing two servers' answers where floating point allows no bit equality."""

from __future__ import annotations

from typing import Any

MARGIN = 1e-4


def output_logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def first_close_step(answer: dict[str, Any], margin: float = MARGIN) -> int:
    """First step whose top-2 logprob margin is under `margin`; the number of steps if there is none."""
    steps = answer["meta_info"]["output_top_logprobs"]
    for index, top in enumerate(steps):
        if top[0][0] - top[1][0] < margin:
            return index
    return len(steps)


def assert_same_generation(
    reference: dict[str, Any], answer: dict[str, Any], *, tolerance: float, margin: float = MARGIN
) -> int:
    """Tokens equal up to the reference's first close step, logprobs within `tolerance` up to there.

    Returns the number of steps compared.
    """
    steps = first_close_step(reference, margin)
    assert answer["output_ids"][:steps] == reference["output_ids"][:steps]
    pairs = zip(output_logprobs(reference)[:steps], output_logprobs(answer)[:steps], strict=True)
    worst = max((abs(a - b) for a, b in pairs), default=0.0)
    assert worst <= tolerance, f"logprobs differ by {worst}"
    return steps
