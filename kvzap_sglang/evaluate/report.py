"""Tables out of answers: means, and paired bootstrap intervals against the full cache."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvzap_sglang.evaluate.results import Row, Setting

ALL_TASKS = "all"
DEPTH_BINS = 5
_RESAMPLES = 2000
_SEED = 0


@dataclass(frozen=True)
class Line:
    """One method on one task. `score`, `full`: means over the same `examples`. `ratio`: score / full, `low` and `high` its

    95 % interval, resampled by context; None where the full cache scores 0 or was not run. `kl`: nats, of task `own`.
    """

    task: str
    length: int
    method: str
    prefill: str
    decode: str
    reuse: str
    examples: int
    contexts: int
    removed: float
    score: float
    full: float | None
    ratio: float | None
    low: float | None
    high: float | None
    kl: float | None

    @property
    def title(self) -> str:
        return f"{self.task}, {self.length} tokens" if self.length else self.task


def summarise(rows: Sequence[Row]) -> list[Line]:
    """A line for each setting, task and length, and one over all tasks of a length where there are several."""
    lines = []
    settings = list(dict.fromkeys(row.setting for row in rows))
    places = list(dict.fromkeys((row.task, row.length) for row in rows))
    lengths = list(dict.fromkeys(length for _, length in places))
    places += [(ALL_TASKS, length) for length in lengths if sum(each == length for _, each in places) > 1]
    for setting in settings:
        mine = [row for row in rows if row.setting == setting]
        full = {row.key: row for row in rows if row.setting == setting.full}
        for task, length in places:
            chosen = [row for row in mine if task in (row.task, ALL_TASKS) and row.length == length]
            if chosen:
                lines.append(_line(task, setting, chosen, full))
    return lines


def paired_interval(score: npt.NDArray[np.float64], full: npt.NDArray[np.float64]) -> tuple[float, float]:
    """95 % bootstrap interval of sum(score) / sum(full) over contexts; `[contexts]` each, sums over their questions."""
    chosen = np.random.default_rng(_SEED).integers(len(score), size=(_RESAMPLES, len(score)))
    below = full[chosen].sum(1)
    ratios = score[chosen].sum(1)[below > 0] / below[below > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def by_depth(rows: Iterable[Row]) -> dict[Setting, list[list[float]]]:
    """Scores of each setting, in `DEPTH_BINS` bins of where the answer lies, the context's start first."""
    binned: dict[Setting, list[list[float]]] = {}
    for row in rows:
        if row.depth is not None:
            bins = binned.setdefault(row.setting, [[] for _ in range(DEPTH_BINS)])
            bins[min(int(row.depth * DEPTH_BINS), DEPTH_BINS - 1)].append(row.score)
    return binned


def write_tables(folder: Path, lines: Sequence[Line], rows: Sequence[Row]) -> None:
    """`results.csv`, `results.json` and `results.md`."""
    records = [asdict(line) for line in lines]
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(Line.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(records)
    (folder / "results.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text("\n".join([markdown(lines), *_depth_tables(rows)]), encoding="utf-8")


def markdown(lines: Iterable[Line]) -> str:
    """One table for each task and length."""
    by_task: dict[str, list[Line]] = {}
    for line in lines:
        by_task.setdefault(line.title, []).append(line)
    parts = []
    for task, group in by_task.items():
        parts.append(
            f"### {task}\n\n| method | prefill | decode | reuse | n (contexts) | removed | score | of full | 95 % | KL |\n|---|---|---|---|---|---|---|---|---|---|"
        )
        for line in group:
            ratio = "" if line.ratio is None else f"{line.ratio:.3f}"
            interval = "" if line.low is None or line.high is None else f"{line.low:.3f} to {line.high:.3f}"
            kl = "" if line.kl is None else f"{line.kl:.4f}"
            parts.append(
                f"| {line.method} | {line.prefill} | {line.decode} | {line.reuse} | {line.examples} ({line.contexts}) | {line.removed:.3f} "
                f"| {line.score:.3f} | {ratio} | {interval} | {kl} |"
            )
        parts.append("")
    return "\n".join(parts)


def _depth_tables(rows: Sequence[Row]) -> Iterator[str]:
    """One table for each task and length whose answers lie somewhere."""
    places = dict.fromkeys((row.task, row.length) for row in rows)
    for task, length in places:
        binned = by_depth(row for row in rows if (row.task, row.length) == (task, length))
        if not binned:
            continue
        edges = [f"{index / DEPTH_BINS:g} to {(index + 1) / DEPTH_BINS:g}" for index in range(DEPTH_BINS)]
        yield f"### {task}, {length} tokens: score by depth of the answer\n"
        yield f"| setting | {' | '.join(edges)} |\n|---|{'---|' * DEPTH_BINS}"
        for setting, bins in binned.items():
            cells = [f"{np.mean(scores):.3f} ({len(scores)})" if scores else "" for scores in bins]
            yield f"| {setting.label} | {' | '.join(cells)} |"
        yield ""


def _line(task: str, setting: Setting, rows: list[Row], full: dict[str, Row]) -> Line:
    pairs = [(row, full[row.key]) for row in rows if row.key in full]
    contexts = list(dict.fromkeys(row.context for row in rows))
    ratio = low = high = full_mean = None
    if pairs:
        full_mean = float(np.mean([reference.score for _, reference in pairs]))
        sums = np.zeros((2, len(contexts)))
        for row, reference in pairs:
            sums[:, contexts.index(row.context)] += row.score, reference.score
        if full_mean > 0:
            ratio = float(sums[0].sum() / sums[1].sum())
            low, high = paired_interval(sums[0], sums[1])
    kls = [row.kl for row in rows if row.kl is not None]
    return Line(
        task=task,
        length=rows[0].length,
        method=setting.method,
        prefill=setting.prefill,
        decode=setting.decode,
        reuse=setting.reuse,
        examples=len(rows),
        contexts=len(contexts),
        removed=float(np.mean([row.removed for row in rows])),
        score=float(np.mean([row.score for row in rows])),
        full=full_mean,
        ratio=ratio,
        low=low,
        high=high,
        kl=float(np.mean(kls)) if kls else None,
    )
