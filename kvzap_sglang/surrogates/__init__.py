"""Surrogates that come with the package, made by `make surrogates`; each folder's `calibration.json` says of what."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def shipped_surrogate(kind: Literal["linear", "mlp"], model: str = "SmolLM2-135M-Instruct") -> Path:
    """The folder, in kvpress' format; `model` is the basename of the model's path."""
    return Path(__file__).parent / f"KVzap-{kind}-{model}"
