"""Per-token kept bits of a run of tokens, as tree nodes and running requests carry them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
BitArray = npt.NDArray[np.uint8]
CountArray = npt.NDArray[np.int32]

_POPCOUNT = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)


def count_bits(packed: BitArray) -> CountArray:
    """Kept pairs per token: uint8 `[n, bytes]` -> int32 `[n]`."""
    return _POPCOUNT[packed].sum(axis=1, dtype=np.int32)


class HeadTokenSets:
    """Which (layer, head) pairs of n consecutive tokens are kept, and what they occupy.

    Attributes:
        packed: uint8 `[n, bytes]`, one bit per (layer, head), `numpy.packbits` order.
        counts: int32 `[n]`, kept pairs per token (derived from `packed`).
        known: bool `[n]`, False until the token's decisions have come back from the device.
        settled: bool `[n]`, True once its condemned cells were ordered free.
        owner: whose decisions will fill the unknown tokens.
    """

    __slots__ = ("cells_per_token", "counts", "known", "owner", "packed", "settled")

    def __init__(
        self,
        packed: BitArray,
        counts: CountArray,
        known: BoolArray,
        settled: BoolArray,
        cells_per_token: int,
        owner: object | None = None,
    ) -> None:
        self.packed, self.counts, self.known, self.settled = packed, counts, known, settled
        self.cells_per_token = cells_per_token
        self.owner = owner

    @classmethod
    def unknown(cls, n: int, cells_per_token: int, owner: object | None = None) -> HeadTokenSets:
        """n freshly launched tokens: dense, decisions pending."""
        return cls(
            np.zeros((n, (cells_per_token + 7) // 8), np.uint8),
            np.zeros(n, np.int32),
            np.zeros(n, np.bool_),
            np.zeros(n, np.bool_),
            cells_per_token,
            owner,
        )

    def __len__(self) -> int:
        return len(self.counts)

    def slice(self, start: int, end: int) -> HeadTokenSets:
        """An independent copy of tokens `[start, end)`."""
        return HeadTokenSets(
            self.packed[start:end].copy(),
            self.counts[start:end].copy(),
            self.known[start:end].copy(),
            self.settled[start:end].copy(),
            self.cells_per_token,
            self.owner,
        )

    def fill(self, start: int, packed: BitArray) -> None:
        """Decisions of tokens `[start, start + len(packed))` arrived."""
        end = start + len(packed)
        self.packed[start:end] = packed
        self.counts[start:end] = count_bits(packed)
        self.known[start:end] = True

    def cells(self, start: int = 0, end: int | None = None) -> int:
        """Cells that tokens `[start, end)` occupy; a settled token of unknown decisions counts 0."""
        part = slice(start, end)
        settled = self.settled[part]
        kept = np.where(self.known[part], self.counts[part], 0)
        return int(np.where(settled, kept, self.cells_per_token).sum())


def concatenate(parts: list[HeadTokenSets], cells_per_token: int) -> HeadTokenSets:
    """Tokens of consecutive runs, in order."""
    if not parts:
        return HeadTokenSets.unknown(0, cells_per_token)
    return HeadTokenSets(
        np.concatenate([p.packed for p in parts]),
        np.concatenate([p.counts for p in parts]),
        np.concatenate([p.known for p in parts]),
        np.concatenate([p.settled for p in parts]),
        cells_per_token,
    )
