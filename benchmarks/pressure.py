"""A pool that is too small: completed tokens per second against stock SGLang and against ourselves without pruning.

    python -m benchmarks.pressure --surrogate FOLDER

All requests of real prose are sent at once to a pool that holds `--pool` of what they need densely. The same load goes
to each server, one after the other on the same machine; what counts are the ratios.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import requests

from benchmarks.machine import describe_machine
from benchmarks.prose import prose_prompts
from benchmarks.servers import press_flags, server_parser
from kvzap_sglang.local_server import LocalServer, local_server


@dataclass
class Pressure:
    """One server under the load.

    completed: requests answered in full; tokens: their output tokens; seconds: until the last one was answered.
    retractions: times that a running request lost its cells and had to be computed again.
    peak_running: most requests that decoded in one step. kept: mean kept fraction of the answers, 1 for stock.
    """

    name: str
    completed: int
    failed: int
    tokens: int
    seconds: float
    retractions: int
    retractions_logged: int
    peak_running: int
    kept: float

    @property
    def rate(self) -> float:
        """Completed tokens per second."""
        return self.tokens / self.seconds


def ask(url: str, prompt: list[int], new_tokens: int) -> dict[str, Any] | None:
    """The answer, None when the server could not give one."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    answer = requests.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=7200)
    if not answer.ok:
        print(f"  a request failed: {answer.status_code} {answer.text[:200]}", flush=True)
    return answer.json() if answer.ok else None


def measure(server: LocalServer, name: str, prompts: list[list[int]], new_tokens: int) -> Pressure:
    """Send everything at once, wait for all answers, count."""
    ask(server.url, list(range(100, 164)), 4)
    start = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: ask(server.url, prompt, new_tokens), prompts))
    seconds = time.perf_counter() - start
    done = [a for a in answers if a is not None and len(a["output_ids"]) == new_tokens]
    metas = [a["meta_info"] for a in done]
    log = server.log()
    return Pressure(
        name,
        completed=len(done),
        failed=len(prompts) - len(done),
        tokens=sum(len(a["output_ids"]) for a in done),
        seconds=seconds,
        retractions=sum(meta["num_retractions"] for meta in metas),
        # The log also counts requests that failed in the end.
        retractions_logged=sum(int(n) for n in re.findall(r"#retracted_reqs: (\d+)", log)),
        peak_running=max((int(n) for n in re.findall(r"Decode batch.*?#running-req: (\d+)", log)), default=0),
        kept=sum(meta.get("kv_press", {}).get("kept_fraction", 1.0) for meta in metas) / max(1, len(metas)),
    )


def run(args: argparse.Namespace) -> Iterator[Pressure]:
    """One server after the other under the same load."""
    prompts = prose_prompts(args.model, args.requests, args.prompt)
    room = int(args.pool * args.requests * (args.prompt + args.new_tokens))
    common = ["--device", "cpu", "--skip-server-warmup", "--dtype", args.dtype, "--decode-log-interval", "1"]
    common += ["--max-running-requests", str(args.requests), "--max-total-tokens", str(room)]
    common += ["--chunked-prefill-size", "2048"]
    servers: list[tuple[str, tuple[str, ...]]] = [
        (f"ours {args.threshold}", press_flags(args.surrogate, args.threshold)),
        ("ours -inf", press_flags(args.surrogate, "-inf")),
    ]
    if not args.skip_stock:
        servers.append(("stock", ("--attention-backend", "torch_native")))
    print(f"pool of {room} dense tokens, {args.requests} requests of {args.prompt} + {args.new_tokens}")
    for name, flags in servers:
        log = args.out / f"pressure-{name.replace(' ', '')}.log"
        env = {"OMP_NUM_THREADS": str(args.threads)}
        with local_server(args.model, log, [*common, *flags], env=env) as server:
            result = measure(server, name, prompts, args.new_tokens)
            print(f"{result}, {result.rate:.1f} completed tokens/s", flush=True)
            yield result


def ratios(results: list[Pressure]) -> dict[str, float]:
    """The pruned server over each of the others."""
    pruned, *others = results
    return {
        f"{what}, {pruned.name} over {other.name}": mine / theirs
        for other in others
        for what, mine, theirs in (
            ("completed tokens/s", pruned.rate, other.rate),
            ("peak running requests", pruned.peak_running, other.peak_running),
        )
        if theirs
    }


def main() -> None:
    parser = server_parser(__doc__, dtype="float32")
    parser.set_defaults(new_tokens=256)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=1500, help="tokens")
    parser.add_argument("--pool", type=float, default=0.4, help="of the tokens that all requests hold densely")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    machine = f"{describe_machine(args.threads)}, {args.dtype}"
    print(machine)
    results = list(run(args))
    found = ratios(results)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    report = {
        "machine": machine,
        "settings": settings,
        "servers": [asdict(r) | {"completed_tokens_per_s": r.rate} for r in results],
        "ratios": found,
    }
    (args.out / "pressure.json").write_text(json.dumps(report, indent=2))
    for name, value in found.items():
        print(f"{name:58s} {value:8.3f}")


if __name__ == "__main__":
    main()
