"""Random inputs of the correctness checks: ragged requests over a shared pool, with holes in the table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvzap_sglang.kernels.encoding import CELL_MASK, CONDEMNED, NONE
from kvzap_sglang.kernels.triton import VisibleChunks, first_chunks

WINDOW = 8
POISON = 1 << 29
"""In lists, where nothing may be read: no pool has that many cells."""


@dataclass
class Requests:
    """One layer's cell table, and requests over it.

    table: int32 `[S, H]`. req_to_token: int32 `[R, context]`. rows, lengths: int64 `[B]`. cells: rows that a pool needs.
    """

    table: torch.Tensor
    req_to_token: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    cells: int

    @property
    def device(self) -> torch.device:
        return self.table.device

    def entries(self, request: int) -> torch.Tensor:
        """Table entries of a request's positions: int64 `[length, H]`."""
        length = int(self.lengths[request])
        return self.table[self.req_to_token[self.rows[request], :length].long()].long()

    def seen(self, request: int, dense_from: int) -> torch.Tensor:
        """DESIGN's rule: bool `[length, H]`, of those kept or at a position from `dense_from` on."""
        entries = self.entries(request)
        position = torch.arange(len(entries), device=self.device)
        return (entries >= 0) & ((entries < CONDEMNED) | (position >= dense_from)[:, None])

    def seen_cells(self, request: int, head: int, dense_from: int) -> torch.Tensor:
        """Cells of what one head sees, in order: int64."""
        mask = self.seen(request, dense_from)[:, head]
        return self.entries(request)[mask, head] & CELL_MASK

    def pools(
        self, dim: int, dtype: torch.dtype, dense_from: list[int], rng: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, random where some request sees a cell, NaN elsewhere."""
        unseen = torch.ones(self.cells, dtype=torch.bool, device=self.device)
        for request, start in enumerate(dense_from):
            unseen[self.entries(request)[self.seen(request, start)] & CELL_MASK] = False
        pools = [normal((self.cells, dim), dtype, self.device, rng) for _ in range(2)]
        for pool in pools:
            pool[unseen] = torch.nan
        return pools[0], pools[1]


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, rng: torch.Generator
) -> torch.Tensor:
    """Normally distributed numbers, the same on every device."""
    return torch.randn(shape, generator=rng).to(device, dtype)


def random_requests(
    lengths: list[int], kept: list[float], device: str, rng: torch.Generator, shared: int = 0
) -> Requests:
    """Requests of the given lengths whose head h keeps about `kept[h]`; of the condemned pairs half are gone.

    shared: positions that all requests have in common (the same slots).
    """
    heads, batch = len(kept), len(lengths)
    needed = shared + sum(max(0, length - shared) for length in lengths)
    slots = 1 + torch.randperm(needed + 20, generator=rng)[:needed]
    cells = 7 + torch.randperm(needed * heads, generator=rng).view(needed, heads)
    condemned = torch.rand(needed, heads, generator=rng) >= torch.tensor(kept)
    gone = condemned & (torch.rand(needed, heads, generator=rng) < 0.5)
    table = torch.full((needed + 30, heads), NONE, dtype=torch.int32)
    table[slots] = torch.where(gone, NONE, torch.where(condemned, cells | CONDEMNED, cells)).to(torch.int32)
    req_to_token = torch.randint(0, len(table), (batch + 3, max([*lengths, 1]) + 5), generator=rng, dtype=torch.int32)
    rows, taken = torch.randperm(batch + 3, generator=rng)[:batch], shared
    for row, length in zip(rows.tolist(), lengths, strict=True):
        own = max(0, length - shared)
        mine = torch.cat([slots[: min(length, shared)], slots[taken : taken + own]])
        req_to_token[row, :length] = mine.to(torch.int32)
        taken += own
    of_each = torch.tensor(lengths, dtype=torch.int64, device=device)
    return Requests(table.to(device), req_to_token.to(device), rows.to(device), of_each, 7 + needed * heads)


def empty_lists(requests: Requests, chunk: int, *, detail: bool = False, spare: int = 2) -> VisibleChunks:
    """Poisoned buffers for a problem. spare: chunks more than the lengths need."""
    heads = requests.table.shape[1]
    chunks = sum(-(-length // chunk) for length in requests.lengths.tolist()) + spare
    first = torch.full((len(requests.rows) + 1,), -9, dtype=torch.int32, device=requests.device)
    cells = torch.full((chunks, heads, chunk), POISON, dtype=torch.int32, device=requests.device)
    counts = torch.full((chunks, heads), POISON, dtype=torch.int32, device=requests.device)
    return VisibleChunks(first_chunks(requests.lengths, chunk, first), cells, counts, cells.clone() if detail else None)
