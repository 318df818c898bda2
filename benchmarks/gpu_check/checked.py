"""What a correctness check is given: kernels, dtype, device, and how much to check."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu_check.kernels import Kernels

KEYS = 64
"""Block of keys of the attention kernels."""


@dataclass(frozen=True)
class Sizes:
    """How much is checked. chunks: positions of a list. groups (of decode, of extend), dims. long: the longest length."""

    chunks: tuple[int, ...]
    groups: tuple[int, ...]
    extend_groups: tuple[int, ...]
    dims: tuple[int, ...]
    long: int

    def edges(self, chunk: int) -> list[int]:
        """Lengths around nothing and the blocks."""
        around = [size + by for size in (KEYS, chunk) for by in (-1, 0, 1)]
        return [0, 1, *around, min(3 * chunk + 5, self.long)]


FULL = Sizes((128, 512, 1024), tuple(range(1, 17)), (1, 2, 5, 8, 16), (64, 96, 128, 256), 3100)
TINY = Sizes((64,), (1, 5, 16), (1, 5), (64, 96), 150)


@dataclass(frozen=True)
class Check:
    """A check's kernels, dtype, device and sizes."""

    kernels: Kernels
    dtype: torch.dtype
    device: str
    sizes: Sizes
