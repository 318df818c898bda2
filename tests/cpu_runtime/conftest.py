"""Shared parts of the tests of set-up, models, demo and examples."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def models() -> Path:
    """The repository's models folder, filled by the converter where `make models` has not been run."""
    smollm2 = pytest.importorskip("kvzap_sglang_cpu.smollm2", reason="kvzap-sglang-cpu is installed on CPUs only")
    tiny = pytest.importorskip("kvzap_sglang_cpu.tiny")
    folder = REPOSITORY / "models"
    smollm2.convert(folder)
    tiny.make(folder)
    return folder


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Import a file of the repository that is no part of a package, by its path relative to the repository."""

    def load(relative: str) -> ModuleType:
        path = REPOSITORY / relative
        spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise FileNotFoundError(path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load
