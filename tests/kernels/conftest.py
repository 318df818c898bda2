"""Random inputs of the kernel tests: fresh in every run, with the seed shown when a test fails."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from kvzap_sglang.kernels.cpu import native


@pytest.fixture
def rng() -> torch.Generator:
    """Generator seeded anew for every test; `KVZAP_TEST_SEED` repeats a failed run."""
    seed = int(os.environ.get("KVZAP_TEST_SEED", random.SystemRandom().randrange(1 << 31)))
    print(f"KVZAP_TEST_SEED={seed}")
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """`torch.set_num_threads`, undone afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def choose_isa(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets `KVZAP_CPU_ISA` for this test; an empty name means the host's best."""

    def choose(name: str) -> None:
        monkeypatch.setenv("KVZAP_CPU_ISA", name)
        native.isa_level.cache_clear()

    yield choose
    native.isa_level.cache_clear()
