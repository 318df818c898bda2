"""A cell pool that keeps books: plain Python sets of who owns what, by rules of their own."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable

import torch

from kvzap_sglang.kernels.encoding import CONDEMNED, NONE
from kvzap_sglang.memory.cell_pool import CellPool
from kvzap_sglang.memory.cell_queue import CellQueue
from kvzap_sglang.memory.layout import CellLayout

Pair = tuple[int, int, int]
"""(layer, head, token slot)."""


class CellBook:
    """What the cell table must say, from the events alone.

    Attributes:
        cells: the cell of every pair in memory. condemned: pairs decided against, also once they are pruned.
        decided: (layer, slot) that were decided since the slot was popped.
    """

    def __init__(self, layout: CellLayout) -> None:
        self.layers, self.heads = range(layout.layers), range(layout.heads)
        self.cells: dict[Pair, int] = {}
        self.condemned: set[Pair] = set()
        self.decided: set[tuple[int, int]] = set()

    def pairs(self, slots: list[int]) -> list[Pair]:
        return list(itertools.product(self.layers, self.heads, slots))

    def pop(self, slots: list[int], table: list[list[list[int]]]) -> None:
        """`slots` got the cells that `table` (`[layers, n, heads]`) now names: new ones, for empty slots."""
        pairs = self.pairs(slots)
        given = [table[layer][slots.index(slot)][head] for layer, head, slot in pairs]
        if (taken := set(pairs) & self.cells.keys()) or len(set(given)) < len(given):
            raise AssertionError(f"popped for slots that hold cells ({taken}), or one cell twice ({given})")
        if shared := set(given) & set(self.cells.values()):
            raise AssertionError(f"cells {shared} were popped while owned")
        self.cells.update(zip(pairs, given, strict=True))
        self.condemned.difference_update(pairs)
        self.decided -= {(layer, slot) for layer, _, slot in pairs}

    def condemn(self, layer: int, slots: list[int], condemned: list[list[bool]]) -> None:
        if again := self.decided & {(layer, slot) for slot in slots}:
            raise AssertionError(f"decided twice: {again}")
        for slot, heads in zip(slots, condemned, strict=True):
            self.decided.add((layer, slot))
            self.condemned |= {(layer, head, slot) for head in self.heads if heads[head]}

    def release(self, slots: list[int]) -> int:
        return sum(self.cells.pop(pair, None) is not None for pair in self.pairs(slots))

    def settle(self, slots: list[int]) -> int:
        gone = [pair for pair in self.pairs(slots) if pair in self.condemned]
        return sum(self.cells.pop(pair, None) is not None for pair in gone)

    def compact(self, slots: list[int]) -> int:
        """Kept cells move, in the order of `slots`, onto the lowest cells that their layer and head had."""
        freed = 0
        for layer, head in itertools.product(self.layers, self.heads):
            owned = [pair for slot in slots if (pair := (layer, head, slot)) in self.cells]
            lowest = iter(sorted(self.cells[pair] for pair in owned))
            for pair in owned:
                if pair in self.condemned:
                    del self.cells[pair]
                    freed += 1
                else:
                    self.cells[pair] = next(lowest)
        return freed

    def heal(self, slots: list[int], spares: list[int]) -> None:
        for slot, spare in zip(slots, spares, strict=True):
            for layer, head in itertools.product(self.layers, self.heads):
                taker, giver = (layer, head, slot), (layer, head, spare)
                if taker not in self.cells and giver in self.cells:
                    if taker not in self.condemned:
                        raise AssertionError(f"healed {taker}, which was not pruned")
                    self.cells[taker] = self.cells.pop(giver)

    def copy(self) -> CellBook:
        other = copy.copy(self)
        other.cells, other.condemned, other.decided = dict(self.cells), set(self.condemned), set(self.decided)
        return other


class BookedPool(CellPool):
    """A `CellPool` that enters every event in a `CellBook` and compares what each gave back."""

    _frozen: torch.Tensor | None = None  # of a copy: its decisions, which change no more

    def reset(self) -> None:
        super().reset()
        self.book = CellBook(self.layout)

    def after(self, queue: CellQueue) -> BookedPool:
        """A copy on which `queue` (left as it is) was drained."""
        other, queue = copy.copy(self), copy.deepcopy(queue)
        other.table, other._stack = self.table.clone(), self._stack.clone()
        other.book = self.book.copy()
        queue.drain(other)
        other._frozen = other._decided_kept()
        return other

    def decided_kept(self, slots: torch.Tensor) -> torch.Tensor:
        """bool `[n, layers, heads]`: pairs of `slots` that were not condemned."""
        kept = self._decided_kept() if self._frozen is None else self._frozen
        return kept[:, slots].permute(1, 0, 2)

    def _decided_kept(self) -> torch.Tensor:
        kept = torch.ones_like(self.table, dtype=torch.bool)
        kept[_index(self.book.condemned)] = False
        return kept

    def pop(self, slots: torch.Tensor) -> None:
        super().pop(slots)
        self.book.pop(slots.tolist(), self.table[:, slots].tolist())

    def condemn(self, layer: int, slots: torch.Tensor, condemned: torch.Tensor) -> None:
        super().condemn(layer, slots, condemned)
        self.book.condemn(layer, slots.tolist(), condemned.tolist())

    def release(self, slots: torch.Tensor) -> int | None:
        return _same("release", super().release(slots), self.book.release(slots.tolist()))

    def settle(self, slots: torch.Tensor) -> int | None:
        return _same("settle", super().settle(slots), self.book.settle(slots.tolist()))

    def settle_compact(self, slots: torch.Tensor) -> int | None:
        return _same("compact", super().settle_compact(slots), self.book.compact(slots.tolist()))

    def heal(self, slots: torch.Tensor, spares: torch.Tensor) -> None:
        super().heal(slots, spares)
        self.book.heal(slots.tolist(), spares.tolist())

    def compare(self) -> list[str]:
        """Differences between table, free stack and book."""
        faults = []
        if not torch.equal(self.table, self._expected()):
            faults.append("the cell table is not what the events made it")
        free = self._stack[: self.free_cells].tolist()
        everything = set(range(1, self.layout.cells_total + 1))
        if len(set(free)) < len(free) or set(free) != everything - set(self.book.cells.values()):
            faults.append("the free stack is not what the events left")
        return faults

    def _expected(self) -> torch.Tensor:
        table = torch.full_like(self.table, NONE)
        table[:, 0] = 0
        table[_index(self.book.cells)] = torch.tensor(list(self.book.cells.values()), dtype=torch.int32)
        table[_index(self.book.condemned & self.book.cells.keys())] += CONDEMNED
        return table


def _index(pairs: Iterable[Pair]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Index of a cell table for `pairs`."""
    layer, head, slot = torch.tensor(list(pairs), dtype=torch.int64).view(-1, 3).unbind(1)
    return layer, slot, head


def _same(event: str, freed: int | None, expected: int) -> int | None:
    if freed != expected:
        raise AssertionError(f"{event} moved {freed} cells, {expected} expected")
    return freed
