"""Development data that may not be shipped: present beside the repository, or the test is skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED_DATA = Path(os.environ.get("KVZAP_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))


def shared_surrogate(kind: str) -> Path:
    """The development surrogate of SmolLM2-135M-Instruct, `kind` mlp or linear."""
    path = SHARED_DATA / f"KVzap-{kind}-SmolLM2-135M-Instruct"
    if not (path / "model.safetensors").is_file():
        pytest.skip(f"{path} is missing: set KVZAP_SHARED_DATA to the folder that holds it")
    return path
