"""Serving speed: ratios against stock SGLang and against ourselves without pruning, in one run.

    python -m benchmarks.serving --model models/SmolLM2-135M-Instruct --surrogate FOLDER

Every figure is a ratio of two servers started one after the other on the same machine; absolute
numbers are printed beside them for reference only.
"""

from __future__ import annotations

import argparse
import json
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
from kvzap_sglang.local_server import local_server


@dataclass
class Timing:
    """Seconds and rates of one server. prefill: cold, tokens/s. hit_ttft: all exact hits answered, s."""

    name: str
    batch: int
    context: int
    prefill: float
    hit_ttft: float
    decode: float


class Client:
    """Concurrent greedy `/generate` calls of fixed length."""

    def __init__(self, url: str, prompts: list[list[int]]) -> None:
        self._url, self._prompts = url, prompts

    def run(self, new_tokens: int) -> float:
        """Seconds until all prompts have `new_tokens` more tokens."""
        start = time.perf_counter()
        with ThreadPoolExecutor(len(self._prompts)) as pool:
            list(pool.map(lambda prompt: self._generate(prompt, new_tokens), self._prompts))
        return time.perf_counter() - start

    def _generate(self, prompt: list[int], new_tokens: int) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        answer = requests.post(f"{self._url}/generate", json=body, timeout=3600)
        answer.raise_for_status()
        return answer.json()


def measure(url: str, name: str, prompts: list[list[int]], new_tokens: int) -> Timing:
    """Cold prefill, exact hits, then decode (the hits' time taken off)."""
    batch, context = len(prompts), len(prompts[0])
    Client(url, [prompt[-64:] for prompt in prompts]).run(4)
    client = Client(url, prompts)
    cold = client.run(1)
    hit = min(client.run(1) for _ in range(2))
    decode = client.run(1 + new_tokens) - hit
    return Timing(name, batch, context, batch * context / cold, hit, batch * new_tokens / decode)


@contextmanager
def server(model: str, log: Path, room: int, threads: int, *flags: str) -> Iterator[str]:
    """A server with physical room for `room` tokens; yields its URL."""
    common = ["--device", "cpu", "--skip-server-warmup", "--max-running-requests", "16"]
    common += ["--max-total-tokens", str(room), "--chunked-prefill-size", "2048"]
    with local_server(model, log, [*common, *flags], env={"OMP_NUM_THREADS": str(threads)}) as running:
        yield running.url


def press_flags(surrogate: str, threshold: str) -> tuple[str, ...]:
    return ("--kv-press", "kvzap", "--kv-press-model", surrogate, f"--kv-press-threshold={threshold}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--surrogate", required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--long-context", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threshold", default="-3")
    parser.add_argument("--dtype", default="bfloat16", help="float32 on processors without bf16 arithmetic")
    parser.add_argument("--skip-stock", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    machine = f"{describe_machine(args.threads)}, {args.dtype}"
    print(machine)
    timings = list(run(args))
    found = ratios({(t.name, t.context): t for t in timings}, args)
    report = {"machine": machine, "timings": [asdict(t) for t in timings], "ratios": found}
    (args.out / "serving.json").write_text(json.dumps(report, indent=2))
    for name, value in found.items():
        print(f"{name:58s} {value:8.3f}")


def run(args: argparse.Namespace) -> Iterator[Timing]:
    """One server after the other, each measured at the contexts it is compared at."""
    servers: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = [
        ("ours -inf", press_flags(args.surrogate, "-inf"), (args.context, args.long_context)),
        (
            f"ours {args.threshold}",
            press_flags(args.surrogate, args.threshold),
            (args.context, args.long_context),
        ),
        ("ours, scored, nothing pruned", press_flags(args.surrogate, "-1000"), (args.context,)),
    ]
    if not args.skip_stock:
        servers.insert(0, ("stock", ("--attention-backend", "torch_native"), (args.context,)))
    for name, flags, contexts in servers:
        room = args.batch * (args.long_context + args.new_tokens + 64)
        log = args.out / "server.log"
        with server(args.model, log, room, args.threads, "--dtype", args.dtype, *flags) as url:
            for seed, context in enumerate(contexts):
                timing = measure(url, name, prose_prompts(args.model, args.batch, context, seed), args.new_tokens)
                print(timing, flush=True)
                yield timing


def ratios(timing: dict[tuple[str, int], Timing], args: argparse.Namespace) -> dict[str, float]:
    """The figures that are compared with their targets."""
    ours, pruned = timing["ours -inf", args.context], timing[f"ours {args.threshold}", args.context]
    scored = timing["ours, scored, nothing pruned", args.context]
    long_ours, long_pruned = (timing[n, args.long_context] for n in ("ours -inf", f"ours {args.threshold}"))
    found = {
        f"decode, {args.threshold} over -inf, {args.batch} x {args.long_context}": long_pruned.decode
        / long_ours.decode,
        "prefill time, scored over unscored": ours.prefill / scored.prefill,
    }
    stock = timing.get(("stock", args.context))
    if stock is not None:
        shape = f"{args.batch} x {args.context}"
        found |= {
            f"decode, ours {args.threshold} over stock, {shape}": pruned.decode / stock.decode,
            f"decode, ours -inf over stock, {shape}": ours.decode / stock.decode,
            f"hit TTFT, ours {args.threshold} over stock, {shape}": pruned.hit_ttft / stock.hit_ttft,
            f"prefill, ours {args.threshold} over stock, {shape}": pruned.prefill / stock.prefill,
        }
    return found


if __name__ == "__main__":
    main()
