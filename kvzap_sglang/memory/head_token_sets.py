"""Per-token kept bits of a run of tokens, as tree nodes and running requests carry them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
BitArray = npt.NDArray[np.uint8]
CountArray = npt.NDArray[np.int32]
IndexArray = npt.NDArray[np.int64]

_POPCOUNT = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)
_ARRAYS = ("packed", "counts", "known", "settled", "healed", "origin")
MIXED = -1
"""Origin of a token whose kept and condemned cells come from different computations."""


class SetShape(NamedTuple):
    """What one token's bits look like.

    cells_per_token: (layer, head) pairs that one rank holds. ranks: tensor-parallel ranks, whose pairs lie
    side by side. rank: this process. Scheduling reads numbers that are the same on every rank.
    """

    cells_per_token: int
    ranks: int = 1
    rank: int = 0

    @property
    def rank_bytes(self) -> int:
        return (self.cells_per_token + 7) // 8


def count_bits(packed: BitArray) -> CountArray:
    """Kept pairs per token and rank: uint8 `[n, ranks, bytes]` -> int32 `[n, ranks]`."""
    return _POPCOUNT[packed].sum(axis=2, dtype=np.int32)


class HeadTokenSets:
    """Which (layer, head) pairs of n consecutive tokens are kept, and what they occupy.

    Attributes:
        packed: uint8 `[n, ranks, bytes]`, one bit per (layer, head), `numpy.packbits` order.
        counts: int32 `[n, ranks]`, kept pairs per token and rank (derived from `packed`).
        known: bool `[n]`, False until the token's decisions have come back from the device.
        settled: bool `[n]`, True once its condemned cells were ordered free.
        healed: bool `[n]`, True where recomputed cells took the place of settled ones: the end of a prefix that
            requests branch from, left dense until memory is short.
        origin: int64 `[n]`, what the tokens were computed from (`RowState.origin`), `MIXED` where that is no one thing.
        owner: whose decisions will fill the unknown tokens.
    """

    __slots__ = (*_ARRAYS, "owner", "shape")

    def __init__(
        self,
        packed: BitArray,
        counts: CountArray,
        known: BoolArray,
        settled: BoolArray,
        healed: BoolArray,
        origin: IndexArray,
        shape: SetShape,
        owner: object | None = None,
    ) -> None:
        self.packed, self.counts, self.known = packed, counts, known
        self.settled, self.healed, self.origin = settled, healed, origin
        self.shape = shape
        self.owner = owner

    @classmethod
    def unknown(cls, n: int, shape: SetShape, owner: object | None = None) -> HeadTokenSets:
        """n freshly launched tokens: dense, decisions pending."""
        packed = np.zeros((n, shape.ranks, shape.rank_bytes), np.uint8)
        counts = np.zeros((n, shape.ranks), np.int32)
        known, settled, healed = (np.zeros(n, np.bool_) for _ in range(3))
        return cls(packed, counts, known, settled, healed, np.zeros(n, np.int64), shape, owner)

    def __len__(self) -> int:
        return len(self.counts)

    def cut(self, start: int, end: int) -> HeadTokenSets:
        """An independent copy of tokens `[start, end)`."""
        part = HeadTokenSets.unknown(0, self.shape, self.owner)
        for name in _ARRAYS:
            setattr(part, name, getattr(self, name)[start:end].copy())
        return part

    def grown(self, capacity: int) -> HeadTokenSets:
        """A copy with room for `capacity` tokens, the new ones unknown."""
        larger = HeadTokenSets.unknown(capacity, self.shape, self.owner)
        for name in _ARRAYS:
            getattr(larger, name)[: len(self)] = getattr(self, name)
        return larger

    def fill(self, start: int, packed: BitArray) -> None:
        """Decisions of tokens `[start, start + len(packed))` arrived: uint8 `[n, ranks, bytes]`."""
        end = start + len(packed)
        self.packed[start:end] = packed
        self.counts[start:end] = count_bits(packed)
        self.known[start:end] = True

    def cells(self, start: int = 0, end: int | None = None) -> int:
        """Cells that tokens `[start, end)` occupy on the rank where they occupy least.

        What freeing them gives every rank. A settled token of unknown decisions counts 0.
        """
        return self._occupied(slice(start, end), self.counts[start:end].min(axis=1))

    def cells_at_most(self, start: int = 0, end: int | None = None) -> int:
        """Cells that tokens `[start, end)` occupy on the rank where they occupy most."""
        most = np.where(self.known[start:end], self.counts[start:end].max(axis=1), self.shape.cells_per_token)
        return self._occupied(slice(start, end), most)

    def rank_cells(self) -> int:
        """Cells that all tokens occupy on this rank (decisions known)."""
        return self._occupied(slice(None), self.counts[:, self.shape.rank])

    def all_cells(self) -> int:
        """Cells that all tokens occupy on all ranks together (decisions known)."""
        per_token = self.shape.cells_per_token * self.shape.ranks
        return int(np.where(self.settled, self.counts.sum(axis=1), per_token).sum())

    def condemned(self, where: BoolArray) -> int:
        """Condemned cells of the known tokens of a mask `[n]`, on the rank that has fewest."""
        most = self.counts[where & self.known].max(axis=1)
        return int((self.shape.cells_per_token - most).sum())

    def miscounted(self) -> bool:
        """Whether the counts are not those of the bits (reads all bits)."""
        return bool((count_bits(self.packed) != self.counts)[self.known].any())

    def dense_tail(self) -> BoolArray:
        """bool `[n]`: known tokens whose condemned cells are still in memory, and are some."""
        return self.known & ~self.settled & self._prunable()

    def pruned(self) -> BoolArray:
        """bool `[n]`: settled tokens that lost a cell by it (or may have: decisions unknown)."""
        return self.settled & (~self.known | self._prunable())

    def _prunable(self) -> BoolArray:
        return np.asarray(self.counts.min(axis=1) < self.shape.cells_per_token)

    def _occupied(self, part: slice, kept: CountArray) -> int:
        return int(np.where(self.settled[part], kept, self.shape.cells_per_token).sum())


def concatenate(parts: list[HeadTokenSets], shape: SetShape) -> HeadTokenSets:
    """Tokens of consecutive runs, in order."""
    if not parts:
        return HeadTokenSets.unknown(0, shape)
    joined = HeadTokenSets.unknown(0, shape)
    for name in _ARRAYS:
        setattr(joined, name, np.concatenate([getattr(part, name) for part in parts]))
    return joined
