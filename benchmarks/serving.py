"""Serving speed: ratios against stock SGLang and against ourselves without pruning, in one run.

    python -m benchmarks.serving --surrogate FOLDER

Two servers run one after the other on the same machine: stock, and ours, whose requests are pruned at `--threshold`,
or, where pruning itself is judged, sent with `custom_params={"kv_press": "off"}`. What counts are the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests

from benchmarks.machine import describe_machine
from benchmarks.prose import prose_prompts
from benchmarks.servers import press_flags, server_parser
from kvzap_sglang.local_server import local_server

SCORER_ROUNDS = 5
# Scored like any other request, but nothing is pruned: the price of the scorer alone.
SCORED = {"threshold": -1000}


@dataclass
class Timing:
    """Seconds and rates of one class of requests. prefill: cold, tokens/s. hit_ttft: all exact hits answered, s."""

    name: str
    batch: int
    context: int
    prefill: float
    hit_ttft: float
    decode: float


class Client:
    """Concurrent greedy `/generate` calls of fixed length. press: `custom_params["kv_press"]`, None for stock."""

    def __init__(self, url: str, prompts: list[list[int]], press: Any = None) -> None:
        self._url, self._prompts, self._press = url, prompts, press

    def run(self, new_tokens: int) -> float:
        """Seconds until all prompts have `new_tokens` more tokens."""
        start = time.perf_counter()
        with ThreadPoolExecutor(len(self._prompts)) as pool:
            list(pool.map(lambda prompt: self._generate(prompt, new_tokens), self._prompts))
        return time.perf_counter() - start

    def _generate(self, prompt: list[int], new_tokens: int) -> Any:
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        if self._press is not None:
            sampling["custom_params"] = {"kv_press": self._press}
        body = {"input_ids": prompt, "sampling_params": sampling}
        answer = requests.post(f"{self._url}/generate", json=body, timeout=3600)
        answer.raise_for_status()
        return answer.json()


def measure(url: str, name: str, prompts: list[list[int]], new_tokens: int, press: Any = None) -> Timing:
    """Cold prefill, exact hits, then decode (the hits' time taken off)."""
    batch, context = len(prompts), len(prompts[0])
    Client(url, [prompt[-64:] for prompt in prompts], press).run(4)
    client = Client(url, prompts, press)
    cold = client.run(1)
    hit = min(client.run(1) for _ in range(2))
    decode = client.run(1 + new_tokens) - hit
    timing = Timing(name, batch, context, batch * context / cold, hit, batch * new_tokens / decode)
    print(timing, flush=True)
    return timing


def scorer_cost(url: str, prompts: list[list[int]]) -> float:
    """Prefill time with the scorer over without it, median of pairs measured in turns on cold prompts."""
    pairs = zip(prompts[::2], prompts[1::2], strict=True)
    found = [Client(url, [one], SCORED).run(1) / Client(url, [other], "off").run(1) for one, other in pairs]
    return statistics.median(found)


@contextmanager
def server(model: str, log: Path, room: int, threads: int, *flags: str) -> Iterator[str]:
    """A server with physical room for `room` tokens; yields its URL."""
    common = ["--device", "cpu", "--skip-server-warmup", "--max-running-requests", "16", "--sleep-on-idle"]
    common += ["--max-total-tokens", str(room), "--chunked-prefill-size", "2048"]
    with local_server(model, log, [*common, *flags], env={"OMP_NUM_THREADS": str(threads)}) as running:
        yield running.url


def arguments() -> argparse.Namespace:
    parser = server_parser(__doc__, dtype="bfloat16")
    parser.set_defaults(new_tokens=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--long-context", type=int, default=4096, help="0 leaves pruned against unpruned out")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    machine = f"{describe_machine(args.threads)}, {args.dtype}"
    print(machine)
    shape = f"{args.batch} x {args.context}"
    ratios: dict[str, float] = {}
    timings = {} if args.skip_stock else {"stock": measure_stock(args)}
    timings |= measure_ours(args, ratios)
    stock, ours = timings.get("stock"), timings["ours"]
    if stock is not None:
        ratios |= {
            f"decode, ours {args.threshold} over stock, {shape}": ours.decode / stock.decode,
            f"hit TTFT, ours {args.threshold} over stock, {shape}": ours.hit_ttft / stock.hit_ttft,
            f"prefill, ours {args.threshold} over stock, {shape}": ours.prefill / stock.prefill,
        }
    report = {"machine": machine, "timings": [asdict(t) for t in timings.values()], "ratios": ratios}
    (args.out / f"serving-{args.dtype}.json").write_text(json.dumps(report, indent=2))
    for name, value in ratios.items():
        print(f"{name:58s} {value:8.3f}")


def measure_stock(args: argparse.Namespace) -> Timing:
    prompts = prose_prompts(args.model, args.batch, args.context)
    room = args.batch * (args.context + args.new_tokens + 128)
    flags = ("--dtype", args.dtype, "--attention-backend", "torch_native")
    with server(args.model, args.out / "stock.log", room, args.threads, *flags) as url:
        return measure(url, "stock", prompts, args.new_tokens)


def measure_ours(args: argparse.Namespace, ratios: dict[str, float]) -> dict[str, Timing]:
    """Ours at the context of stock; the scorer alone; pruned against unpruned at the long context."""
    room = args.batch * (2 * args.long_context + 2 * args.context + 1024)
    flags = ("--dtype", args.dtype, *press_flags(args.surrogate, args.threshold))
    with server(args.model, args.out / "ours.log", room, args.threads, *flags) as url:
        prompts = prose_prompts(args.model, args.batch, args.context)
        timings = {"ours": measure(url, f"ours {args.threshold}", prompts, args.new_tokens)}
        ratios["prefill time, scored over unscored"] = scorer_cost(
            url, prose_prompts(args.model, 2 * SCORER_ROUNDS, 512, seed=1)
        )
        if args.long_context:
            prompts = prose_prompts(args.model, args.batch, args.long_context, seed=2)
            pruned = measure(url, f"ours {args.threshold}", prompts, args.new_tokens)
            whole = measure(url, "ours, unpruned", prompts, args.new_tokens, "off")
            timings |= {"long pruned": pruned, "long whole": whole}
            ratios[f"decode, {args.threshold} over unpruned, {args.batch} x {args.long_context}"] = (
                pruned.decode / whole.decode
            )
    return timings


if __name__ == "__main__":
    main()
