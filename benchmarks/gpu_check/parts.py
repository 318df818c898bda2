"""The parts of a run. On a GPU each is a process of its own: a kernel that breaks its CUDA context breaks one part.

A part yields records; its process prints each on a line of its own, so that what was found before a crash is not lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

import torch

from benchmarks.gpu_check import attention_checks, pool_checks
from benchmarks.gpu_check.checked import FULL, TINY, Check
from benchmarks.gpu_check.clock import copy_bytes_per_second
from benchmarks.gpu_check.comparing import Case, run_cases
from benchmarks.gpu_check.context import Context, Record, attempt
from benchmarks.gpu_check.decode_times import decode_times
from benchmarks.gpu_check.graph import graph_times, step_cases
from benchmarks.gpu_check.other_times import extend_times, score_times
from benchmarks.gpu_check.tuning import tuning_times

Part = Callable[[Context], Iterator[Record]]
PREFIX = "RECORD "
CHECK_SECONDS, JOBS = 240.0, 8
"""A check's process may take so long (a kernel may hang); so many run at once."""
GRACE = 60.0
"""Seconds after the deadline until a process that times is stopped."""


def parts(device: str) -> tuple[dict[str, Part], dict[str, Part]]:
    """Checks, which may run side by side, and what is timed, one after the other."""
    dtypes = [torch.bfloat16, torch.float16, torch.float32] if device == "cuda" else [torch.float32, torch.float16]
    checks: dict[str, Part] = {
        "visible": partial(_check, attention_checks.visible_cases, torch.float32),
        "compact": partial(_check, attention_checks.compact_cases, torch.float32),
        "cells": partial(_check, pool_checks.cell_cases, torch.float32),
        "report": partial(_check, pool_checks.report_cases, torch.float32),
    }
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for what in ("lengths", "groups", "dims"):
            checks[f"decode {what} {name}"] = partial(_check, partial(attention_checks.decode_cases, part=what), dtype)
            checks[f"extend {what} {name}"] = partial(_check, partial(attention_checks.extend_cases, part=what), dtype)
        checks[f"write {name}"] = partial(_check, pool_checks.write_cases, dtype)
        checks[f"scores {name}"] = partial(_check, pool_checks.score_cases, dtype)
        checks[f"step {name}"] = partial(_check, _step_cases, dtype)
    timed: dict[str, Part] = {
        "copy": _ceiling,
        "step times": graph_times,
        "decode times": decode_times,
        "extend times": extend_times,
        "score times": score_times,
        "tuning times": tuning_times,
    }
    return checks, timed


def _check(cases: Callable[[Check], Iterator[Case]], dtype: torch.dtype, context: Context) -> Iterator[Record]:
    check = Check(context.kernels, dtype, context.device, TINY if context.tiny else FULL)
    yield from run_cases(cases(check), dtype, context.seed, context.device)


def _step_cases(check: Check) -> Iterator[Case]:
    return step_cases(check.kernels, check.dtype, check.device, check.sizes is TINY)


def _ceiling(context: Context) -> Iterator[Record]:
    yield attempt({"kind": "copy"}, lambda: {"bytes_per_s": copy_bytes_per_second(context.device)})


def run_here(context: Context) -> Iterator[Record]:
    """Every part in this process, one after the other; on the order of seconds each with tiny shapes."""
    checks, timed = parts(context.device)
    for name, part in (checks | timed).items():
        yield {"kind": "part", "name": name}
        yield from _guarded(name, part, context)


def _guarded(name: str, part: Part, context: Context) -> Iterator[Record]:
    try:
        yield from part(context)
    except Exception as problem:
        yield {"kind": "broken", "part": name, "error": f"{type(problem).__name__}: {problem}"[:500]}


def print_part(name: str, context: Context) -> None:
    """Run one part and print its records."""
    checks, timed = parts(context.device)
    for record in _guarded(name, (checks | timed)[name], context):
        print(PREFIX + json.dumps(record), flush=True)


def run_in_processes(context: Context, jobs: int = JOBS) -> Iterator[Record]:
    """Every part in a process: checks side by side, then what is timed."""
    checks, timed = parts(context.device)
    queue: SimpleQueue[Record | None] = SimpleQueue()

    def feed() -> None:
        with ThreadPoolExecutor(jobs) as pool:
            for name in checks:
                pool.submit(_process, name, context, CHECK_SECONDS, queue)
        for name in timed:
            _process(name, context, max(GRACE, context.deadline - time.perf_counter() + GRACE), queue)
        queue.put(None)

    threading.Thread(target=feed, daemon=True).start()
    while (record := queue.get()) is not None:
        yield record


def _process(name: str, context: Context, seconds: float, queue: SimpleQueue[Record | None]) -> None:
    """One part's process; whatever it does, what it said is in the queue, and how it ended when it ended badly."""
    queue.put({"kind": "part", "name": name})
    left = max(0.0, context.deadline - time.perf_counter())
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--part", name, "--seed", str(context.seed)]
    command += ["--budget-s", str(left)] + ["--tiny"] * context.tiny
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read() if process.stderr else ""))
    reader.start()
    for line in process.stdout or ():
        if line.startswith(PREFIX):
            queue.put(json.loads(line.removeprefix(PREFIX)))
    code = process.wait()
    timer.cancel()
    reader.join()
    if code:
        last = errors[0].strip()[-500:] if errors else ""
        queue.put({"kind": "broken", "part": name, "error": f"exit status {code} {last}"})
