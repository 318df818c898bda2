"""The pool's memory is asked for in huge pages, before it is touched; the values are what they were."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kvzap_sglang.memory.cell_pool import CellPool
from kvzap_sglang.memory.huge_pages import HUGE_PAGE, advise, empty_in_huge_pages
from kvzap_sglang.memory.layout import CellLayout

SMAPS = Path("/proc/self/smaps")
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_small_tensors_are_left_alone() -> None:
    assert not advise(torch.empty(0)) and not advise(torch.empty(100))
    assert not advise(torch.empty(HUGE_PAGE // 4, dtype=torch.uint8))


@pytest.mark.skipif(
    not SWITCH.is_file() or "[never]" in SWITCH.read_text(), reason="this system gives no transparent huge pages"
)
def test_large_tensors_ask_for_huge_pages() -> None:
    """Whether any are free is the machine's affair; the area's flags say what it was asked for."""
    tensor = empty_in_huge_pages(8, HUGE_PAGE, dtype=torch.uint8, device="cpu").fill_(3)
    assert advise(tensor) and int(tensor.min()) == 3
    start = tensor.data_ptr() + HUGE_PAGE
    areas = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: ([a-z ]*)$", SMAPS.read_text(), re.MULTILINE | re.DOTALL)
    (flags,) = [flags.split() for low, high, flags in areas if int(low, 16) <= start < int(high, 16)]
    assert "hg" in flags


def test_a_pool_starts_empty() -> None:
    pool = CellPool(CellLayout(2, 2, 64, 32, 4, 9000, 9000), torch.float32, "cpu")
    assert not pool.k.any() and not pool.v.any() and pool.check() == []
