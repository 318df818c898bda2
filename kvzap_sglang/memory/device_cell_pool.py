"""A cell pool whose free stack is worked on by Triton kernels: what a step frees is counted on the device only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvzap_sglang.kernels import counters
from kvzap_sglang.kernels.triton import free_cells, take_cells
from kvzap_sglang.memory.cell_pool import CellPool
from kvzap_sglang.memory.layout import CellLayout
from kvzap_sglang.to_device import to_device


class DeviceCellPool(CellPool):
    """A `CellPool` on a GPU (or in Triton's interpreter): no call waits for the device, but the properties do.

    Kept cells are not moved together when they settle: a row of 128 bytes or more fills the transactions that read it.

    Attributes:
        counters: int64 `[counters.COUNTERS]`, on the device. An underflow, or a cell freed twice, is flagged there.
    """

    def __init__(self, layout: CellLayout, dtype: torch.dtype, device: torch.device | str) -> None:
        self.counters = torch.zeros(counters.COUNTERS, dtype=torch.int64, device=device)
        super().__init__(layout, dtype, device)

    def reset(self) -> None:
        super().reset()
        # In place: recorded graphs know the address.
        self.counters[counters.FREE] = self.layout.cells_total

    @property
    def free_cells(self) -> int:
        return int(self.counters[counters.FREE])

    @property
    def pruned_cells(self) -> int:
        return int(self.counters[counters.PRUNED])

    def pop(self, slots: torch.Tensor) -> None:
        """See `CellPool.pop`. More than are free: the last slots get no cells, and the counters say `UNDERFLOW`."""
        take_cells(self.table, slots, self._stack, self.counters)

    def release(self, slots: torch.Tensor) -> None:
        free_cells(self.table, slots, self._stack, self.counters, settle=False)

    def settle(self, slots: torch.Tensor) -> None:
        free_cells(self.table, slots, self._stack, self.counters, settle=True)

    settle_compact = settle

    def settle_rows(self, req_to_token: torch.Tensor, ranges: Sequence[tuple[int, int, int]]) -> None:
        """See `CellPool.settle_rows`; one copy to the device and one launch, whatever the ranges."""
        if not ranges:
            return
        lengths = [end - start for _, start, end in ranges]
        rows = np.repeat([row for row, _, _ in ranges], lengths)
        positions = np.concatenate([np.arange(start, end) for _, start, end in ranges])
        where = to_device(np.stack([rows, positions]), req_to_token.device)
        free_cells(self.table, where, self._stack, self.counters, settle=True, req_to_token=req_to_token)

    def check(self) -> list[str]:
        return super().check() + counters.faults(int(self.counters[counters.FAULT]))

    def side_buffers(self) -> dict[str, int]:
        return super().side_buffers() | {"counters": self.counters.numel() * self.counters.element_size()}
