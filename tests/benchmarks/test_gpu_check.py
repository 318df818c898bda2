"""The GPU check itself: it runs everywhere in Triton's interpreter, names every kernel, and sees one that is broken."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import attention_checks, graph, kernels, parts, pool_checks, report
from benchmarks.gpu_check.checked import TINY as TINY_SIZES
from benchmarks.gpu_check.checked import Check
from benchmarks.gpu_check.comparing import run_cases
from benchmarks.gpu_check.context import Context
from benchmarks.gpu_check.shapes import TINY
from benchmarks.gpu_check.spread import kept_fractions

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def call(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu_check", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)


@NO_GPU
def test_tiny_runs_everything_and_says_that_it_is_no_gpu(tmp_path: Path) -> None:
    done = call("--tiny", "--out", str(tmp_path), timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert {path.name for path in tmp_path.iterdir()} == {"interpreter_check.json", "interpreter_check.md"}
    found = json.loads((tmp_path / "interpreter_check.json").read_text())
    records: list[dict[str, Any]] = found["records"]
    assert (
        found["complete"]
        and found["failures"] == []
        and found["machine"]["gpu"] is None
        and "NOT a GPU" in found["machine"]["times"]
    )
    checks = [r for r in records if r["kind"] == "check"]
    assert len(checks) > 150 and all(r["status"] == "ok" for r in checks)
    assert set(kernels.NAMES) <= {r["kernel"] for r in checks} and "decode step" in {r["kernel"] for r in checks}
    assert {r["dtype"] for r in checks} == {"float32", "float16"}
    assert any(r["kind"] == "skipped" and "bfloat16" in r["what"] for r in records)
    timed = {r["kind"]: r for r in records if "error" not in r}
    assert {"copy", "dense", "decode", "extend", "scores", "step", "tuning"} <= timed.keys()
    assert timed["step"]["two_runs_equal"] and timed["step"]["replay_equals_eager"] is None
    for text in ((tmp_path / "interpreter_check.md").read_text(), done.stdout):
        assert "NOT a GPU result" in text
    assert all("[interpreter]" in line for line in done.stdout.splitlines()[1:-1])


@NO_GPU
def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    done = call("--out", str(tmp_path / "out"), timeout=120)
    assert done.returncode == 1 and "no NVIDIA GPU" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    done = call("--out", str(tmp_path), "--budget-s", "240", timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert found["failures"] == [] and found["machine"]["gpu"]


def context(broken: kernels.Kernels | None = None) -> Context:
    return Context(broken or kernels.ours(), DEVICE, True, 1, time.perf_counter() + 600)


def off_by_a_little(*arguments: Any) -> None:
    """`chunked_decode` whose output is wrong in one place."""
    kernels.ours().chunked_decode(*arguments)
    arguments[7][-1, -1, -1] += 0.1


def not_written(*arguments: Any) -> None:
    """A kernel that writes nothing."""


def first_kept_bit(*arguments: Any) -> None:
    """`step_report` with one bit flipped."""
    kernels.ours().step_report(*arguments)
    if len(arguments[2]) > 32:
        arguments[2][32] ^= 128


def crash(*arguments: Any) -> None:
    raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("name", "broken", "cases"),
    [
        ("chunked_decode", off_by_a_little, lambda check: attention_checks.decode_cases(check, "groups")),
        ("chunked_decode", crash, lambda check: attention_checks.decode_cases(check, "dims")),
        ("visible_chunks", not_written, attention_checks.visible_cases),
        ("compact_lists", not_written, attention_checks.compact_cases),
        ("extend", not_written, lambda check: attention_checks.extend_cases(check, "groups")),
        ("write_cells", not_written, pool_checks.write_cases),
        ("step_report", first_kept_bit, pool_checks.report_cases),
        ("mlp_scores", not_written, pool_checks.score_cases),
    ],
)
def test_a_broken_kernel_is_seen(name: str, broken: Callable[..., None], cases: Callable[[Check], Any]) -> None:
    check = Check(replace(kernels.ours(), **{name: broken}), torch.float32, DEVICE, TINY_SIZES)
    records = list(run_cases(cases(check), torch.float32, 1, DEVICE))
    bad = [r for r in records if r["status"] in report.BAD]
    # Cases without a token have nothing to be wrong.
    assert len(bad) > len(records) / 2 and all(name in text for text in report.failures(records))


def test_what_else_is_broken_in_the_pool_is_seen() -> None:
    for name in ("take_cells", "free_cells"):
        check = Check(replace(kernels.ours(), **{name: not_written_settle}), torch.float32, DEVICE, TINY_SIZES)
        records = list(run_cases(pool_checks.cell_cases(check), torch.float32, 1, DEVICE))
        assert any(r["status"] == "wrong" and r["kernel"] == name for r in records)


def not_written_settle(*arguments: Any, settle: bool = False) -> None:
    """As `not_written`."""


def test_a_failure_makes_the_exit_status_1_and_the_rest_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, _ = parts.parts("cpu")
    chosen = {name: checks[name] for name in ("decode dims float32", "report")}
    monkeypatch.setattr(parts, "parts", lambda device: (chosen, {}))
    broken = replace(kernels.ours(), chunked_decode=not_written)
    monkeypatch.setattr(kernels, "ours", lambda: broken)
    args = argparse.Namespace(out=tmp_path, tiny=True, budget_s=60.0, seed=0, part=None)
    assert command.run(args, DEVICE) == 1
    found = json.loads(next(tmp_path.glob("*_check.json")).read_text())
    assert any(text.startswith("chunked_decode, head dim 64") for text in found["failures"])
    assert "no passing check of extend" in found["failures"]
    reports = [r for r in found["records"] if r["kind"] == "check" and r["kernel"] == "step_report"]
    assert reports and all(r["status"] == "ok" for r in reports)


@NO_GPU
def test_parts_are_processes_whose_end_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that work, one that fails, one that hangs."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(parts, "parts", lambda device: (dict.fromkeys(("report", "no such part")), {"copy": None}))
    records = list(parts.run_in_processes(context(), jobs=2))
    queue: SimpleQueue[Any] = SimpleQueue()
    parts._process("cells", context(), 0.2, queue)
    records += [queue.get() for _ in range(queue.qsize())]
    assert sum(r["kind"] == "check" and r["status"] == "ok" for r in records) == 24
    assert [r["name"] for r in records if r["kind"] == "part"][-2:] == ["copy", "cells"]
    assert any(r["kind"] == "copy" and r["bytes_per_s"] > 0 for r in records)
    broken = {r["part"]: r["error"] for r in records if r["kind"] == "broken"}
    assert "KeyError" in broken["no such part"] and broken["cells"].startswith("exit status -9")
    assert len(broken) == 2 and len(report.failures(records)) == 2


def test_what_does_not_fit_the_budget_is_skipped_and_said() -> None:
    late = replace(context(), deadline=0.0)
    _, timed = parts.parts("cpu")
    records = [r for name in ("step times", "decode times", "extend times", "tuning times") for r in timed[name](late)]
    assert records and all(r["kind"] == "skipped" and "budget" in r["reason"] for r in records)
    assert "budget" in report.markdown({"gpu": "some", "times": ""}, records, [], 1.0)


class FakeGraph:
    """Runs what was recorded."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.replay = run


@pytest.mark.parametrize("broken", [False, True])
def test_the_comparison_of_replay_and_eager(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a graph that only runs its function, or forgets the last layer when the lengths are not the recorded ones."""

    def capture(run: Callable[[], object]) -> FakeGraph:
        def replay() -> None:
            run()
            if broken and int(step.lengths[0]) != 140:
                step.out[-1] = 0

        return FakeGraph(replay)

    monkeypatch.setattr(graph, "capture", capture)
    monkeypatch.setattr(graph, "replay_seconds", lambda recorded, before: [before() or 1.0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kept = kept_fractions(0.5, TINY.layers, TINY.kv_heads, 0)
    step = graph.build_step(TINY, [140, 140], kept, torch.float32, 64, DEVICE, 0)
    if broken:
        with pytest.raises(graph.Wrong, match="out at"):
            graph._replay(context(), step, graph.Snapshot(step))
    else:
        found = graph._replay(context(), step, graph.Snapshot(step))
        assert found["replay_equals_eager"] and found["seconds"] == 1.0 and "share_not_attention" in found
