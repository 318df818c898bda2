"""Cells, the cell table and the free stack: the physical half of the cache.

Everything here runs on the forward stream only (DESIGN: Memory and time order).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvzap_sglang.kernels.encoding import CELL_MASK, CONDEMNED, NONE
from kvzap_sglang.memory.huge_pages import empty_in_huge_pages
from kvzap_sglang.memory.layout import CellLayout

# Below this many tokens a pop does not sort the free stack: a decode step's few cells
# gain nothing from lying together.
SORT_FROM_TOKENS = 32
# Settled ranges from this length on are compacted: below it a copy costs more than it saves.
COMPACT_FROM_TOKENS = 64


class CellUnderflow(RuntimeError):
    """More cells were popped than are free: the ledger let something through."""


class CellPool:
    """K/V rows of all layers and heads in one pool, found through a cell table.

    Attributes:
        k: `[cells_total + 1, head_dim]`, row 0 is the sink of padded tokens.
        v: `[cells_total + 1, v_head_dim]`.
        table: int32 `[layers, virtual_tokens + 1, heads]`, `kernels.encoding`; slot 0 maps to the sink.

    What frees cells returns their number, or None where only the device knows it (`DeviceCellPool`).
    """

    def __init__(self, layout: CellLayout, dtype: torch.dtype, device: torch.device | str) -> None:
        self.layout = layout
        rows = layout.cells_total + 1
        if rows > CELL_MASK:
            raise ValueError(
                f"{rows} cells do not fit the cell table's 30 bits: lower --max-total-tokens or --mem-fraction-static"
            )
        self.k = empty_in_huge_pages(rows, layout.head_dim, dtype=dtype, device=device).zero_()
        self.v = empty_in_huge_pages(rows, layout.v_head_dim, dtype=dtype, device=device).zero_()
        self.table = torch.empty(
            layout.layers, layout.virtual_tokens + 1, layout.heads, dtype=torch.int32, device=device
        )
        self._stack = torch.empty(layout.cells_total, dtype=torch.int32, device=device)
        self._pruned = 0
        self.reset()

    def reset(self) -> None:
        """Every cell free, every slot empty."""
        self.table.fill_(NONE)
        self.table[:, 0, :] = 0
        # Descending, so that the top of the stack is the lowest run of rows.
        torch.arange(self.layout.cells_total, 0, -1, dtype=torch.int32, out=self._stack)
        self._free = self.layout.cells_total
        self._sorted = True

    @property
    def free_cells(self) -> int:
        return self._free

    @property
    def pruned_cells(self) -> int:
        """Cells freed by settling so far."""
        return self._pruned

    def pop(self, slots: torch.Tensor) -> None:
        """Give each of `slots` (int64 `[n]`, empty slots) a cell in every layer and head.

        Head-major: one (layer, head)'s n cells are consecutive stack entries, hence
        consecutive rows where the pool allows. Raises `CellUnderflow`.
        """
        n = slots.numel()
        need = n * self.layout.cells_per_token
        if need > self._free:
            raise CellUnderflow(f"{need} cells wanted, {self._free} free of {self.layout.cells_total}")
        if n >= SORT_FROM_TOKENS and not self._sorted:
            self._sort()
        top = self._stack[self._free - need : self._free].flip(0)
        cells = top.view(self.layout.layers, self.layout.heads, n)
        self.table[:, slots, :] = cells.permute(0, 2, 1)
        self._free -= need

    def release(self, slots: torch.Tensor) -> int | None:
        """Free every cell of `slots` (int64 `[n]`, no duplicates)."""
        entries = self.table[:, slots, :]
        freed = self._push(entries[entries >= 0] & CELL_MASK)
        self.table[:, slots, :] = NONE
        return freed

    def condemn(self, layer: int, slots: torch.Tensor, condemned: torch.Tensor) -> None:
        """Mark (slot, head) pairs of `layer`: `condemned` is bool `[n, heads]`."""
        rows = self.table[layer]
        rows[slots] = torch.where(condemned, rows[slots] | CONDEMNED, rows[slots])

    def settle(self, slots: torch.Tensor) -> int | None:
        """Free the condemned cells of `slots` (int64 `[n]`): two requests may have ordered the same slot settled."""
        slots = slots.unique()
        entries = self.table[:, slots, :]
        gone = entries >= CONDEMNED
        freed = self._push(entries[gone] & CELL_MASK)
        self.table[:, slots, :] = entries.masked_fill(gone, NONE)
        self._pruned += freed
        return freed

    def settle_rows(self, req_to_token: torch.Tensor, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Settle the tokens of positions `[start, end)` of rows of `req_to_token`, for each (row, start, end).

        A prompt's kept cells are moved together, a decode step's stay.
        """
        single: list[torch.Tensor] = []
        for row, start, end in ranges:
            slots = req_to_token[row, start:end].to(torch.int64)
            if end - start >= COMPACT_FROM_TOKENS:
                self.settle_compact(slots)
            else:
                single.append(slots)
        if single:
            self.settle(torch.cat(single))

    def settle_compact(self, slots: torch.Tensor) -> int | None:
        """`settle`, and move the kept cells of each (layer, head) together.

        The kept rows move, in the order of `slots`, onto the lowest rows that the (layer, head) owned among
        `slots`: rows that lie together read 2-3 times faster on a CPU, and what is freed is a run too. Slots
        of one call should be positions of one sequence, in order.
        """
        freed = sum(self._compact_layer(self.table[layer], slots) for layer in range(self.layout.layers))
        self._pruned += freed
        return freed

    def _compact_layer(self, table: torch.Tensor, slots: torch.Tensor) -> int:
        entries = table[slots].T  # [heads, n]
        owned = entries >= 0
        kept = owned & (entries < CONDEMNED)
        cells = entries & CELL_MASK
        rows = torch.where(owned, cells, CELL_MASK).sort(dim=1).values
        place = (kept.cumsum(dim=1) - 1).clamp(min=0)
        moved = torch.where(kept, rows.gather(1, place), NONE)
        table[slots] = moved.T.to(torch.int32)
        changed = kept & (moved != cells)
        source, target = cells[changed].long(), moved[changed].long()
        # Gathered before anything is written: a target may be another row's source.
        self.k[target] = self.k[source]
        self.v[target] = self.v[source]
        order = torch.arange(slots.numel(), device=slots.device)
        left = (order >= kept.sum(dim=1, keepdim=True)) & (order < owned.sum(dim=1, keepdim=True))
        return self._push(rows[left].to(torch.int32))

    def heal(self, slots: torch.Tensor, spares: torch.Tensor) -> None:
        """Give `slots` the cells of `spares`, as condemned ones, where they have none themselves.

        Both int64 `[n]`, distinct; `spares[i]` holds the same token recomputed.
        """
        own, spare = self.table[:, slots, :], self.table[:, spares, :]
        moved = (own == NONE) & (spare >= 0)
        self.table[:, slots, :] = torch.where(moved, spare | CONDEMNED, own)
        self.table[:, spares, :] = spare.masked_fill(moved, NONE)

    def kept(self, slots: torch.Tensor) -> torch.Tensor:
        """bool `[n, layers, heads]`: pairs that are in memory and not condemned."""
        entries = self.table[:, slots, :]
        return ((entries >= 0) & (entries < CONDEMNED)).permute(1, 0, 2)

    def held(self, slots: torch.Tensor) -> torch.Tensor:
        """int64 `[n]`: cells that each of `slots` occupies."""
        return (self.table[:, slots, :] >= 0).sum(dim=(0, 2))

    def check(self) -> list[str]:
        """Violations of "every cell is free exactly once or owned exactly once" (full scan)."""
        entries = self.table[:, 1:, :]
        live = entries[entries >= 0] & CELL_MASK
        owners = torch.bincount(
            torch.cat([live, self._stack[: self.free_cells]]).long(), minlength=self.layout.cells_total + 1
        )
        faults = []
        if int(owners[0]):
            faults.append(f"sink cell owned {int(owners[0])} times")
        lost, shared = int((owners[1:] == 0).sum()), int((owners[1:] > 1).sum())
        if lost:
            faults.append(f"{lost} cells are neither free nor in the cell table")
        if shared:
            faults.append(f"{shared} cells have more than one owner (double free or stale table entry)")
        return faults

    def side_buffers(self) -> dict[str, int]:
        """Bytes of the buffers beside K and V."""
        buffers = {"cell_table": self.table, "free_stack": self._stack}
        return {name: t.numel() * t.element_size() for name, t in buffers.items()}

    def _push(self, cells: torch.Tensor) -> int:
        n = cells.numel()
        if self._free + n > self.layout.cells_total:
            raise RuntimeError(f"{n} cells freed onto {self._free} free of {self.layout.cells_total}: freed twice")
        self._stack[self._free : self._free + n] = cells
        self._free += n
        self._sorted = self._sorted and n == 0
        return n

    def _sort(self) -> None:
        free = self._stack[: self._free]
        if free.device.type == "cpu":
            # numpy's vectorised sort is several times faster than torch's here.
            view = free.numpy()
            view.sort()
            view[:] = view[::-1].copy()
        else:
            free.copy_(torch.sort(free, descending=True).values)
        self._sorted = True
