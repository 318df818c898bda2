"""A mix of small requests that end in every way, sent as fast as the server takes them."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.workloads import tokens

ENDINGS = ("length", "stop token", "stop string", "abort", "disconnect")
PROBE_TOKEN = 45000
"""Probes start with a token from here on, which `tokens` never returns: nothing shares their prefix."""


@dataclass
class Tally:
    """What happened. `ends`: answers by (asked ending, finish reason). `probes`: prompt, new tokens, answer."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    retractions: int = 0
    polls: int = 0
    probes: list[tuple[list[int], int, dict[str, Any]]] = field(default_factory=list)


class Soak:
    """Requests of up to `longest` prompt and `new_tokens` new tokens on a few stems."""

    def __init__(self, url: str, longest: int, new_tokens: int, seed: int) -> None:
        self.tally = Tally()
        self._url, self._longest, self._new_tokens = url, longest, new_tokens
        self._rng = random.Random(seed)
        self._stems = [tokens(self._rng, longest - 8) for _ in range(4)]
        self._answered: list[tuple[list[int], list[int]]] = []

    async def run(self, requests: int, probes: int, workers: int) -> None:
        """`requests` requests, every so often one of `probes` probes between them; polls counters meanwhile."""
        every = max(1, requests // probes)
        jobs = iter(range(requests))
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._url, timeout=timeout, connector=connector) as session:
            done = asyncio.Event()
            monitor = asyncio.create_task(self._monitor(session, done))
            await asyncio.gather(*(self._worker(session, jobs, every) for _ in range(workers)))
            done.set()
            await monitor

    async def _worker(self, session: aiohttp.ClientSession, jobs: Iterator[int], every: int) -> None:
        for job in jobs:
            if job % every == 0:
                await self._probe(session, job // every)
            await self._request(session, self._rng.choice(ENDINGS))

    async def _probe(self, session: aiohttp.ClientSession, index: int) -> None:
        """Odd ones are longer than the window of 32 and lose pairs; even ones never do."""
        length, new_tokens = (self._rng.randint(20, self._longest), 6) if index % 2 else (20, 12)
        prompt = [PROBE_TOKEN + index % 4000, *tokens(self._rng, length - 1)]
        body = {"input_ids": prompt, "sampling_params": greedy(new_tokens), "return_logprob": True}
        async with session.post("/generate", json=body | {"top_logprobs_num": 2}) as answer:
            assert answer.ok, await answer.text()
            self.tally.probes.append((prompt, new_tokens, await answer.json()))

    def _prompt(self) -> list[int]:
        stem = self._rng.choice(self._stems)
        return stem[: self._rng.randrange(len(stem))] + tokens(self._rng, self._rng.randint(1, 8))

    async def _request(self, session: aiohttp.ClientSession, ending: str) -> None:
        rng = self._rng
        new_tokens = rng.randint(1, 4) if ending == "length" else rng.randint(2, self._new_tokens)
        sampling, prompt = greedy(new_tokens), self._prompt()
        if ending == "stop token" and self._answered:
            # A prompt that was answered before, to stop at what it was answered with.
            prompt, seen = rng.choice(self._answered)
            sampling |= {"stop_token_ids": seen, "ignore_eos": False}
        elif ending == "stop string":
            sampling["stop"] = ["e", "a"]
        body = {"input_ids": prompt, "sampling_params": sampling, "rid": uuid.uuid4().hex}
        if ending in ("abort", "disconnect"):
            await self._leave(session, ending, body)
            return
        async with session.post("/generate", json=body) as answer:
            assert answer.ok, await answer.text()
            done = await answer.json()
        self._count(ending, done)
        if ending == "length":
            self._answered = [*self._answered[-50:], (prompt, done["output_ids"])]

    async def _leave(self, session: aiohttp.ClientSession, ending: str, body: dict[str, Any]) -> None:
        """Stream, and end it after a moment or after the first chunks."""
        async with session.post("/generate", json=body | {"stream": True}) as answer:
            assert answer.ok, await answer.text()
            if self._rng.random() < 0.5:
                await asyncio.sleep(self._rng.uniform(0, 0.1))
            else:
                for _ in range(self._rng.randint(1, 4)):
                    await answer.content.readline()
            if ending == "disconnect":
                answer.close()
                self.tally.ends[ending, "left"] += 1
                return
            async with session.post("/abort_request", json={"rid": body["rid"]}) as aborted:
                assert aborted.ok
            chunks = [line async for line in answer.content if line.startswith(b"data: {")]
        if chunks:
            self._count(ending, json.loads(chunks[-1][6:]))

    def _count(self, ending: str, answer: dict[str, Any]) -> None:
        meta = answer["meta_info"]
        self.tally.ends[ending, meta["finish_reason"]["type"]] += 1
        self.tally.retractions += meta.get("num_retractions") or 0

    async def _monitor(self, session: aiohttp.ClientSession, done: asyncio.Event) -> None:
        """Every counter is a count, whenever one looks."""
        while not done.is_set():
            async with session.get("/server_info") as answer:
                info = (await answer.json())["internal_states"][0]["kv_press"]
            counters = {name: value for name, value in info.items() if isinstance(value, int | float)}
            assert min(counters.values()) >= 0, counters
            assert max(info["cells_free"], info["cells_tree"]) <= info["cells_total"], info
            assert 0 <= info["kept_fraction_estimate"] <= 1
            self.tally.polls += 1
            await asyncio.sleep(0.2)


def greedy(new_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
