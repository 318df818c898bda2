"""Changes to the cell table that wait for the head of the next forward."""

from __future__ import annotations

from itertools import groupby
from typing import Literal, NamedTuple

import torch

from kvzap_sglang.memory.cell_pool import CellPool


class CellChange(NamedTuple):
    """One change to token slots (int64 `[n]`). spares: of a heal, the slots whose cells are taken."""

    kind: Literal["release", "settle", "heal"]
    slots: torch.Tensor
    spares: torch.Tensor


_NO_SLOTS = torch.empty(0, dtype=torch.int64)


class CellQueue:
    """Keeps changes in the order in which the CPU decided them; the order matters.

    A slot released after it was queued for settling is empty or settled by then; a slot healed after it was
    settled must not be settled again.
    """

    def __init__(self) -> None:
        self._changes: list[CellChange] = []

    def release(self, slots: torch.Tensor) -> None:
        self._changes.append(CellChange("release", _copy(slots), _NO_SLOTS))

    def settle(self, slots: torch.Tensor) -> None:
        self._changes.append(CellChange("settle", _copy(slots), _NO_SLOTS))

    def heal(self, slots: torch.Tensor, spares: torch.Tensor) -> None:
        self._changes.append(CellChange("heal", _copy(slots), _copy(spares)))

    def clear(self) -> None:
        self._changes.clear()

    def drain(self, cells: CellPool) -> None:
        """Apply everything queued, runs of one kind together."""
        changes, self._changes = self._changes, []
        for kind, run in groupby(changes, key=lambda change: change.kind):
            if kind == "release":
                cells.release(torch.cat([change.slots for change in run]))
            elif kind == "settle":
                cells.settle(torch.cat([change.slots for change in run]))
            else:
                for change in run:
                    cells.heal(change.slots, change.spares)


def _copy(slots: torch.Tensor) -> torch.Tensor:
    return slots.to(torch.int64, copy=True)
