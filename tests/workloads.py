"""Request mixes: shared prefixes, second turns, branches, long prompts, concurrency."""

from __future__ import annotations

import random
from typing import Any

from tests.servers import Server

VOCABULARY = 40000


def tokens(rng: random.Random, n: int) -> list[int]:
    """n ordinary token ids (none of them special)."""
    return [rng.randrange(100, VOCABULARY) for _ in range(n)]


def mixed_prompts(seed: int) -> list[list[list[int]]]:
    """Three waves of prompts, 24 in all: chains and long ones, branches, eight that share a prefix."""
    rng = random.Random(seed)
    base = tokens(rng, 200)
    long = tokens(rng, 320)
    chain = [base[:100], base, base + tokens(rng, 60), long, tokens(rng, 1), tokens(rng, 129)]
    branches = [base[:150] + tokens(rng, 40), long[:63] + tokens(rng, 30), long[:192] + tokens(rng, 128)]
    branches += [base[:40] + tokens(rng, n) for n in (1, 88, 200)]
    shared = tokens(rng, 250)
    burst = [shared[: 250 - 20 * i] + tokens(rng, 10 + 17 * i) for i in range(8)]
    return [chain, branches, burst, [tokens(rng, n) for n in (127, 128, 64, 65)]]


def run_mixed(server: Server, seed: int, second_turns: list[list[int]] | None = None) -> list[dict[str, Any]]:
    """30 requests: the waves of `mixed_prompts`, then six second turns on earlier answers.

    Second turns continue this server's own answers, or the given prompts (to compare two servers).
    """
    rng = random.Random(seed + 1)
    answers: list[dict[str, Any]] = []
    prompts: list[list[int]] = []
    waves = mixed_prompts(seed)
    for wave in waves[:2]:
        answers += [server.generate(p, 16, logprob=True) for p in wave]
    for wave in waves[2:]:
        answers += server.generate_all([{"input_ids": p, "max_new_tokens": 24, "logprob": True} for p in wave])
    prompts = [p for wave in waves for p in wave]
    if second_turns is None:
        chosen = [0, 2, 3, 6, 12, 20]
        second_turns = [prompts[i] + answers[i]["output_ids"] + tokens(rng, 30) for i in chosen]
    answers += [server.generate(p, 16, logprob=True) for p in second_turns]
    for answer, prompt in zip(answers, [*prompts, *second_turns], strict=True):
        answer["prompt"] = prompt
    return answers
