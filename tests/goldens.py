"""Greedy runs of NVIDIA's kvpress on SmolLM2-135M-Instruct, as `scripts/kvpress_goldens.py` wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def kvpress_runs() -> list[dict[str, Any]]:
    """Prompts of 300, 700 and 1260 tokens of real text, each in four configurations."""
    runs: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "kvpress_smollm2.json").read_text())
    return runs
