"""Pictures of an evaluation: score against removed fraction, and score by depth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kvzap_sglang.evaluate.report import DEPTH_BINS, Line, by_depth
from kvzap_sglang.evaluate.results import Row, Setting


def draw(folder: Path, lines: Sequence[Line], rows: Sequence[Row]) -> bool:
    """Write PNGs to `folder`; False, and nothing, where matplotlib (the extra `evaluate`) is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    for title in dict.fromkeys(line.title for line in lines):
        alike = [line for line in lines if line.title == title]
        _removed(folder / f"removed-{_file(title)}.png", alike)
        place = (alike[0].task, alike[0].length)
        deep = [row for row in rows if (row.task, row.length) == place and row.depth is not None]
        if deep:
            _depth(folder / f"depth-{_file(title)}.png", deep)
    return True


def _removed(file: Path, lines: Sequence[Line]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.subplots()
    families: dict[str, list[Line]] = {}
    for line in lines:
        method = line.method.split(" as ")[0] if " as " in line.method else line.method.rsplit(" ", 1)[0]
        families.setdefault(Setting(method, line.prefill, line.decode, line.reuse).label, []).append(line)
    for name, group in families.items():
        group = sorted((line for line in group if line.ratio is not None), key=lambda line: line.removed)
        if group:
            ratios = [line.ratio or 0.0 for line in group]
            below = [max(0.0, ratio - (line.low or 0.0)) for ratio, line in zip(ratios, group, strict=True)]
            above = [max(0.0, (line.high or 0.0) - ratio) for ratio, line in zip(ratios, group, strict=True)]
            axes.errorbar(
                [line.removed for line in group], ratios, yerr=[below, above], marker="o", capsize=3, label=name
            )
    axes.set(
        xlabel="removed fraction of the context",
        ylabel="score, of the full cache's",
        title=lines[0].title,
        ylim=(0, None),
    )
    if axes.lines or axes.containers:
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=110)


def _depth(file: Path, rows: Sequence[Row]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for setting, bins in by_depth(rows).items():
        points = [((i + 0.5) / DEPTH_BINS, sum(scores) / len(scores)) for i, scores in enumerate(bins) if scores]
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            label=setting.label,
        )
    axes.set(xlabel="depth of the needle (0 start, 1 end)", ylabel="score", title=rows[0].task, ylim=(0, 1.02))
    axes.legend(fontsize="x-small")
    figure.savefig(file, dpi=110)


def _file(title: str) -> str:
    return re.sub(r"\W+", "-", title)
