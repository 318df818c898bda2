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


LEVELS = ["generic", "avx2", "avx512"]


@pytest.fixture
def need_isa(choose_isa: Callable[[str], None]) -> Callable[[str], None]:
    """`choose_isa`, or a skip with the reason where it cannot be had."""

    def need(name: str) -> None:
        library = native.build.library()
        if library is None:
            pytest.skip(f"nothing to test: {native.build.failure()}")
        if LEVELS.index(name) > library.kvzap_best_isa():
            pytest.skip(f"this host has no {name}")
        choose_isa(name)

    return need
