"""Is every Triton kernel right on this GPU, and how fast.

    python -m benchmarks.gpu_check --out DIR [--budget-s 450]     # on a GPU: about 8 minutes at most
    python -m benchmarks.gpu_check --out DIR --tiny               # anywhere: does the script itself work

Needs torch, triton and numpy; FlashInfer is timed beside ours where it is installed. Writes `gpu_check.json` and
`gpu_check.md` to DIR (`interpreter_check.*` without a GPU); exits with 1 when anything was not right.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.environment import INTERPRETED, describe, prepare


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes; without a GPU in Triton's interpreter")
    parser.add_argument("--budget-s", type=float, default=450.0, help="no timing begins after so many seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is None and args.out is None:
        parser.error("--out is needed")
    return args


def run(args: argparse.Namespace, device: str) -> int:
    """Everything; returns the exit status. Triton is imported from here on only."""
    from benchmarks.gpu_check import parts, report
    from benchmarks.gpu_check.context import Context
    from benchmarks.gpu_check.kernels import ours

    began = time.perf_counter()
    context = Context(ours(), device, args.tiny, args.seed, began + args.budget_s)
    if args.part is not None:
        parts.print_part(args.part, context)
        return 0
    machine = describe(device)
    if device != "cuda":
        print(f"{INTERPRETED}. bfloat16 is skipped: the interpreter computes it wrongly.", flush=True)
    records = parts.run_in_processes(context) if device == "cuda" and not args.tiny else parts.run_here(context)
    kept: list[dict[str, Any]] = []
    if device != "cuda":
        reason = "Triton's interpreter computes bfloat16 wrongly"
        kept.append({"kind": "skipped", "what": "checks and times in bfloat16", "reason": reason})
    for record in shown(records, began, machine):
        if record["kind"] == "part":  # so that a run that is stopped leaves what it found
            report.write(args.out, machine, kept, time.perf_counter() - began, complete=False)
        else:
            kept.append(record)
    path = report.write(args.out, machine, kept, time.perf_counter() - began, complete=True)
    failed = report.failures(kept) + report.unchecked(kept)
    print(f"{len(failed)} failures, {path}" + ("" if machine["gpu"] else f" ({INTERPRETED})"), flush=True)
    return int(bool(failed))


def shown(records: Iterator[dict[str, Any]], began: float, machine: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The records, each told as it comes; passed checks silently."""
    from benchmarks.gpu_check import report

    mark = "" if machine["gpu"] else "[interpreter] "
    for record in records:
        if record["kind"] != "check" or record["status"] != "ok":
            print(f"{time.perf_counter() - began:6.1f} s {mark}{report.describe(record)} {record.get('error', record.get('message', ''))}", flush=True)  # fmt: skip
        yield record


def main() -> None:
    args = arguments()
    raise SystemExit(run(args, prepare(args.tiny)))


if __name__ == "__main__":
    main()
