"""Random inputs of the Triton kernels: ragged requests over a shared pool, with holes in the table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvzap_sglang.kernels.encoding import CONDEMNED, NONE
from kvzap_sglang.kernels.triton import VisibleChunks, first_chunks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CELLS_BEFORE = 7  # of the pool, that no entry names


@dataclass
class Requests:
    """Cell table of one layer, token slots of all requests, and what each is long."""

    table: torch.Tensor
    req_to_token: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    cells: int

    def dense_from(self, window: int) -> torch.Tensor:
        """First position of the window of each request's last one."""
        return self.lengths - 1 - window


def random_requests(
    lengths: list[int], kept: list[float], rng: torch.Generator, *, shared: int = 0, window: int = 8
) -> Requests:
    """Requests of the given lengths whose head h keeps `kept[h]` of its pairs; the condemned are gone or still there.

    shared: positions that all requests have in common (the same slots).
    """
    heads, batch = len(kept), len(lengths)
    slots_wanted = shared + sum(max(0, n - shared) for n in lengths)
    slots = 1 + torch.randperm(slots_wanted + 20, generator=rng)[:slots_wanted]
    table = torch.full((slots_wanted + 30, heads), NONE, dtype=torch.int32)
    cells = CELLS_BEFORE + torch.randperm(slots_wanted * heads, generator=rng).view(slots_wanted, heads)
    condemned = torch.rand(slots_wanted, heads, generator=rng) >= torch.tensor(kept)
    gone = condemned & (torch.rand(slots_wanted, heads, generator=rng) < 0.5)
    entries = torch.where(condemned, cells | CONDEMNED, cells)
    table[slots] = torch.where(gone, NONE, entries).to(torch.int32)
    context = max([*lengths, 1]) + 5
    req_to_token = torch.randint(0, len(table), (batch + 3, context), generator=rng, dtype=torch.int32)
    rows = torch.randperm(batch + 3, generator=rng)[:batch]
    taken = shared
    for row, length in zip(rows.tolist(), lengths, strict=True):
        own = max(0, length - shared)
        req_to_token[row, :length] = torch.cat([slots[: min(length, shared)], slots[taken : taken + own]])
        taken += own
    tensors = (table, req_to_token, rows, torch.tensor(lengths, dtype=torch.int64))
    return Requests(*(tensor.to(DEVICE) for tensor in tensors), CELLS_BEFORE + slots_wanted * heads)


def empty_lists(requests: Requests, chunk: int, *, detail: bool = False) -> VisibleChunks:
    """Buffers for a problem, poisoned."""
    heads = requests.table.shape[1]
    chunks = sum(-(-n // chunk) for n in requests.lengths.tolist()) + 2
    first = torch.full((len(requests.rows) + 1,), -9, dtype=torch.int32, device=DEVICE)
    cells = torch.full((chunks, heads, chunk), 1 << 29, dtype=torch.int32, device=DEVICE)
    counts = torch.full((chunks, heads), 1 << 29, dtype=torch.int32, device=DEVICE)
    positions = cells.clone() if detail else None
    return VisibleChunks(first_chunks(requests.lengths, chunk, first), cells, counts, positions)
