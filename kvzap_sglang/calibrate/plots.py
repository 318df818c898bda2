"""Pictures beside a surrogate: R^2 by head, scores against targets, removed fraction by threshold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvzap_sglang.calibrate.quality import Predictions


def draw(folder: Path, predictions: Predictions, report: dict[str, Any]) -> bool:
    """Write three PNGs to `folder`; False, and nothing, where matplotlib (the extra `evaluate`) is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    folder.mkdir(parents=True, exist_ok=True)

    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(list(zip(*report["r2_per_head"], strict=True)), aspect="auto", vmin=0, vmax=1)
    axes.set(xlabel="layer", ylabel="KV head", title=f"held-out R² by head, mean {report['r2']:.3f}")
    figure.colorbar(image)
    figure.savefig(folder / "r2.png", dpi=110)

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for label, values in (("target", predictions.targets), ("surrogate", predictions.predicted)):
        axes.hist(values.flatten().numpy(), bins=120, density=True, histtype="step", label=label)
    axes.axvline(report["default_threshold"], color="grey", linestyle=":", label="default threshold")
    axes.set(xlabel="score (natural log)", ylabel="density", title="held-out scores, all layers and heads")
    axes.legend()
    figure.savefig(folder / "scores.png", dpi=110)

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    table = report["thresholds"]
    for key, label in (
        ("removed", "removed by the surrogate"),
        ("target_removed", "removed by the target"),
        ("agreement", "decisions that agree"),
    ):
        axes.plot([row["threshold"] for row in table], [row[key] for row in table], label=label)
    axes.set(xlabel="threshold", ylabel="fraction of decided pairs", ylim=(0, 1))
    axes.legend()
    figure.savefig(folder / "thresholds.png", dpi=110)
    return True
