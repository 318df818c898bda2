"""Many long generations at once: how many requests the server runs side by side, and how fast.

    python examples/long_reasoning_batch.py --base-url http://127.0.0.1:30000 --requests 16 --max-tokens 512

Long outputs fill a KV cache; what the press frees while they grow lets the scheduler admit more of them. Run it against
a server with and one without --kv-press, both with the same memory and a --max-running-requests that does not bind.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from typing import Any

import openai
import requests

PROBLEMS = (
    "A farmer has 17 sheep and buys 3 more each month. How many are there after two years? Reason step by step.",
    "Three painters need 6 hours for a fence. How long do 4 painters need for two fences? Reason step by step.",
    "A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive? Reason step by step.",
    "A shop sells pens at 3 for 2 crowns. What do 45 pens cost after a discount of 10 %? Reason step by step.",
)


@dataclass(frozen=True)
class BatchResult:
    """What one batch did. `kept_fractions` is empty when the server runs without a press."""

    peak_running: int
    generated_tokens: int
    seconds: float
    kept_fractions: tuple[float, ...]


async def generate(client: openai.AsyncOpenAI, model: str, index: int, max_tokens: int) -> dict[str, Any]:
    """One generation of exactly `max_tokens` tokens; its meta_info."""
    reply = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"Problem {index + 1}. {PROBLEMS[index % len(PROBLEMS)]}"}],
        max_tokens=max_tokens,
        temperature=0,
        # Every request has the same length, so that runs can be compared.
        extra_body={"return_meta_info": True, "ignore_eos": True},
    )
    meta: dict[str, Any] = (reply.choices[0].model_extra or {}).get("meta_info") or {}
    return meta


def running_requests(root: str) -> int:
    """Requests in the scheduler's running batch now, over all data-parallel ranks."""
    reply = requests.get(f"{root}/v1/loads", params={"include": "core"}, timeout=30)
    reply.raise_for_status()
    return sum(int(load["num_running_reqs"]) for load in reply.json()["loads"])


async def watch_peak(root: str, done: asyncio.Event) -> int:
    """Poll `running_requests` twice a second until `done`; the largest seen."""
    peak = 0
    while not done.is_set():
        running = await asyncio.to_thread(running_requests, root)
        if running > peak:
            peak = running
            print(f"running requests: {peak}", flush=True)
        try:
            await asyncio.wait_for(done.wait(), timeout=0.5)
        except TimeoutError:
            continue
    return peak


async def run(base_url: str, count: int, max_tokens: int) -> BatchResult:
    """Send `count` generations at once and wait for all of them."""
    root = base_url.rstrip("/").removesuffix("/v1")
    client = openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="none", timeout=3600, max_retries=0)
    model = (await client.models.list()).data[0].id
    done = asyncio.Event()
    watcher = asyncio.create_task(watch_peak(root, done))
    start = time.monotonic()
    try:
        metas = await asyncio.gather(*(generate(client, model, i, max_tokens) for i in range(count)))
    finally:
        done.set()
    seconds = time.monotonic() - start
    return BatchResult(
        peak_running=await watcher,
        generated_tokens=sum(int(meta["completion_tokens"]) for meta in metas),
        seconds=seconds,
        kept_fractions=tuple(meta["kv_press"]["kept_fraction"] for meta in metas if meta.get("kv_press")),
    )


def main() -> int:
    """Command line; 1 with a message when the server cannot be reached or refuses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000", help="the server, with or without /v1")
    parser.add_argument("--requests", type=int, default=16, help="how many generations at once")
    parser.add_argument("--max-tokens", type=int, default=512, help="length of each")
    args = parser.parse_args()
    try:
        result = asyncio.run(run(args.base_url, args.requests, args.max_tokens))
    except openai.APIConnectionError:
        print(f"no server answers at {args.base_url}: start one with `make serve`", file=sys.stderr)
        return 1
    except (openai.APIError, requests.RequestException) as error:
        print(f"the server at {args.base_url} failed: {error}", file=sys.stderr)
        return 1
    kept = result.kept_fractions
    print(f"peak running requests  {result.peak_running} of {args.requests}")
    print(f"generated tokens       {result.generated_tokens} in {result.seconds:.1f} s")
    print(f"tokens/s               {result.generated_tokens / result.seconds:.1f}")
    print(f"kept at the end        {f'{sum(kept) / len(kept):.1%} of cells' if kept else 'all: no --kv-press'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
