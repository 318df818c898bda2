"""The records of a run as JSON, and as Markdown that can be read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.context import Record
from benchmarks.gpu_check.environment import INTERPRETED
from benchmarks.gpu_check.kernels import NAMES

BAD = ("wrong", "error")


def failures(records: list[Record]) -> list[str]:
    """What was not right, by name: failed checks, and whatever ended with an error."""
    found = []
    for record in records:
        if record["kind"] == "check" and record["status"] in BAD:
            found.append(f"{record['kernel']}, {record['case']}, {record['dtype']}: {record['message']}")
        elif record["kind"] not in ("check", "dense") and "error" in record:
            found.append(f"{record.get('part', describe(record))}: {record['error']}")
    return found


def unchecked(records: list[Record]) -> list[str]:
    """Kernels of which no check passed."""
    passed = {record["kernel"] for record in records if record["kind"] == "check" and record["status"] == "ok"}
    return [name for name in NAMES if name not in passed]


def describe(record: Record) -> str:
    """One line that names a record."""
    hidden = ("kind", "profiler", "q_heads", "kv_heads", "dim", "reason", "error", "models")
    return f"{record['kind']} " + ", ".join(f"{k} {v}" for k, v in record.items() if k not in hidden and _short(v))


def _short(value: Any) -> bool:
    return isinstance(value, str | int | float) and len(str(value)) < 60


def write(folder: Path, machine: Record, records: list[Record], seconds: float, *, complete: bool) -> Path:
    """JSON with every number, and the tables; returns the tables' path. The names say when it was no GPU."""
    name = "gpu_check" if machine["gpu"] else "interpreter_check"
    folder.mkdir(parents=True, exist_ok=True)
    failed = failures(records) + [f"no passing check of {name}" for name in unchecked(records) if complete]
    content = {"machine": machine, "complete": complete, "seconds": seconds, "failures": failed, "records": records}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1))
    path = folder / f"{name}.md"
    path.write_text(("" if complete else "**Not complete.**\n\n") + markdown(machine, records, failed, seconds))
    return path


def markdown(machine: Record, records: list[Record], failed: list[str], seconds: float) -> str:
    """What a person reads first: failures, then checks, then times."""
    lines = [f"# gpu_check: {machine['gpu'] or 'no GPU'}", ""]
    if not machine["gpu"]:
        lines += [f"**{INTERPRETED}.**", ""]
    lines += ["; ".join(f"{k} {v}" for k, v in machine.items()) + f"; {seconds:.0f} s in all", ""]
    lines += [f"**{len(failed)} failures**", *(f"* {text}" for text in failed), ""]
    lines += _checks(records)
    ceiling = next((r["bytes_per_s"] for r in records if r["kind"] == "copy" and "bytes_per_s" in r), None)
    lines += (
        [f"A copy on the device: {ceiling / 1e9:.0f} GB/s, read and written.", ""] if ceiling and machine["gpu"] else []
    )
    if not machine["gpu"]:
        lines += ["**The times below mean nothing: no GPU was used.**", ""]
    for section in (_steps, _decodes, _extends, _scores, _tuning):
        lines += section(records, ceiling)
    skipped = [r for r in records if r["kind"] == "skipped"]
    return "\n".join(
        [*lines, f"## Skipped ({len(skipped)})", *(f"* {describe(r)}: {r['reason']}" for r in skipped), ""]
    )


def _table(title: str, columns: list[str], rows: Iterable[list[str]]) -> list[str]:
    body = ["| " + " | ".join(row) + " |" for row in rows]
    return (
        [f"## {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body, ""] if body else []
    )


def _checks(records: list[Record]) -> list[str]:
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["kind"] == "check":
            groups.setdefault((record["kernel"], record["dtype"]), []).append(record)

    def row(key: tuple[str, str], group: list[Record]) -> list[str]:
        counts = [str(sum(r["status"] in of for r in group)) for of in (("ok",), BAD, ("unsupported",))]
        worst = max((r["worst_error_of_allowed"] for r in group if r["status"] == "ok"), default=float("nan"))
        return [*key, *counts, f"{worst:.2f}"]

    columns = ["kernel", "dtype", "passed", "failed", "unsupported", "largest error, of what is allowed"]
    return _table("Checks", columns, (row(*item) for item in groups.items()))


def _of(ceiling: float | None, rate: float) -> str:
    return f"{rate / ceiling:.0%}" if ceiling else "?"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _steps(records: list[Record], ceiling: float | None) -> list[str]:
    rows = (
        [r["model"], f"{r['batch']} x {r['context']}", f"{r['kept']}", str(r.get("replay_equals_eager")),
         _us(r["seconds"]), _us(r["list_seconds"]), _us(r["attention_seconds"]), f"{r['share_not_attention']:.1%}"]
        for r in records if r["kind"] == "step" and "seconds" in r
    )  # fmt: skip
    columns = [
        "model",
        "batch x context",
        "kept",
        "replay equals eager",
        "step, us",
        "lists, us",
        "attention, us",
        "share not attention",
    ]
    return _table("A decode step's own kernels, all layers, one graph", columns, rows)


def _decodes(records: list[Record], ceiling: float | None) -> list[str]:
    """The fastest chunk size of each configuration; dense attention elsewhere beside it."""
    dense: dict[tuple[str, int, int], dict[str, float]] = {}
    best: dict[tuple[Any, ...], Record] = {}
    for r in records:
        key = ("/".join(r.get("models", [])), r.get("batch", 0), r.get("context", 0))
        if r["kind"] == "dense" and "seconds" in r:
            dense.setdefault(key, {})[r["name"].split()[0]] = min(
                r["seconds"], dense.get(key, {}).get(r["name"].split()[0], float("inf"))
            )
        elif r["kind"] == "decode" and "seconds" in r:
            case = (*key, r["layout"], r["kept"])
            best[case] = min(best.get(case, r), r, key=lambda x: x["seconds"])
    rows = (_decode_row(case, r, dense.get(case[:3], {}), best, ceiling) for case, r in best.items())
    columns = ["models", "batch x context", "layout", "kept", "chunk", "lists, us", "attention, us", "both, us",
               "K/V bytes/s of attention, of a copy", "of both", "over SDPA dense", "over FlashInfer dense", "over own, all kept"]  # fmt: skip
    return _table("Decode attention of one layer", columns, rows)


def _decode_row(
    case: tuple[Any, ...],
    r: Record,
    dense: dict[str, float],
    best: dict[tuple[Any, ...], Record],
    ceiling: float | None,
) -> list[str]:
    own = best.get((*case[:4], 1.0))
    ratios = [f"{t / r['seconds']:.2f}x" if t else "" for t in (dense.get("SDPA"), dense.get("FlashInfer"))]
    return [
        case[0], f"{case[1]} x {case[2]}", case[3], f"{case[4]}", str(r["chunk"]), _us(r["list_seconds"]),
        _us(r["attention_seconds"]), _us(r["seconds"]), _of(ceiling, r["attention_kv_bytes_per_s"]),
        _of(ceiling, r["kv_bytes_per_s"]), *ratios, f"{own['seconds'] / r['seconds']:.2f}x" if own else "",
    ]  # fmt: skip


def _extends(records: list[Record], ceiling: float | None) -> list[str]:
    def row(r: Record) -> list[str]:
        teraflops = r["dense_rule_flops"] / r["seconds"] / 1e12
        sdpa = f"{r['sdpa_seconds'] / r['seconds']:.2f}x" if "sdpa_seconds" in r else ""
        return [
            f"{r['tokens']}",
            f"{r['prefix']}",
            f"{r['kept']}",
            r["rule"],
            _us(r["seconds"]),
            f"{teraflops:.0f}",
            sdpa,
        ]

    columns = ["models", "tokens", "prefix", "kept of it", "rule", "us", "TFLOP/s (dense rule)", "over causal SDPA"]
    return _table("A prompt's chunk, one layer", columns, (row(r) for r in _timed(records, "extend")))


def _scores(records: list[Record], ceiling: float | None) -> list[str]:
    rows = (
        [f"{r['tokens']}", f"{r['units']}", _us(r["seconds"]), _of(ceiling, r["bytes"] / r["seconds"])]
        for r in _timed(records, "scores")
    )
    return _table("Scores, one layer (one buffer again and again: it may stay in the cache)", ["tokens", "units", "us", "bytes/s of a copy"], rows)  # fmt: skip


def _tuning(records: list[Record], ceiling: float | None) -> list[str]:
    rows = (
        [f"{r['batch']} x {r['context']}", r["variant"], _us(r["list_seconds"]), _us(r["attention_seconds"])]
        for r in records if r["kind"] == "tuning" and "list_seconds" in r
    )  # fmt: skip
    columns = ["batch x context", "variant", "lists, us", "attention, us"]
    return _table("Launched otherwise, one layer, 33 % kept, scattered", columns, rows)


def _timed(records: list[Record], kind: str) -> list[Record]:
    return [r for r in records if r["kind"] == kind and "seconds" in r]
