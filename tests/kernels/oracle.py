"""What every kernel is compared with: explicit loops and masks in fp64, written from DESIGN's rules only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvzap_sglang.kernels.encoding import CONDEMNED, NONE, VisibleCells

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q `[T, D]`, k and v `[n, D]`, mask bool `[T, n]` -> fp64 out `[T, D]` and lse `[T]`; no visible key: 0, -inf."""
    scores = (q.double() @ k.double().T) * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(dim=1) if k.shape[0] else torch.full((q.shape[0],), float("-inf"), dtype=torch.float64)
    weights = torch.where(mask, (scores - lse[:, None]).exp(), torch.zeros((), dtype=torch.float64))
    return weights @ v.double(), lse


def decode(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, lists: list[list[int]], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q `[B, Hq, D]`, one list of cells per (request, KV head) -> fp64 out `[B, Hq, D]` and lse `[B, Hq]`."""
    batch, q_heads, dim = q.shape
    heads = len(lists) // batch
    queries = q.reshape(batch * heads, q_heads // heads, dim)
    parts = []
    for s, cells in enumerate(lists):
        rows = torch.tensor(cells, dtype=torch.int64)
        everything = torch.ones(queries.shape[1], len(cells), dtype=torch.bool)
        parts.append(attend(queries[s], k_pool[rows], v_pool[rows], everything, scale))
    out = torch.stack([part[0] for part in parts]).view(batch, q_heads, dim)
    return out, torch.stack([part[1] for part in parts]).view(batch, q_heads)


def visible_lists(
    table: torch.Tensor, slots: list[list[int]], dense_from: list[int]
) -> list[list[tuple[int, int, bool]]]:
    """(cell, position, condemned) of every visible entry, one list per (request, KV head)."""
    rows = table.tolist()
    result = []
    for request, start in zip(slots, dense_from, strict=True):
        for head in range(table.shape[1]):
            seen = []
            for position, slot in enumerate(request):
                entry = rows[slot][head]
                if entry == NONE:
                    continue
                condemned = entry >= CONDEMNED
                if not condemned or position >= start:
                    seen.append((entry - CONDEMNED if condemned else entry, position, condemned))
            result.append(seen)
    return result


def ragged(lists: list[list[int]]) -> VisibleCells:
    """Lists of cells as a `VisibleCells`."""
    indptr = torch.tensor([0, *(len(cells) for cells in lists)]).cumsum(0)
    flat = [cell for cells in lists for cell in cells]
    return VisibleCells(indptr, torch.tensor(flat, dtype=torch.int32))


@dataclass(frozen=True)
class Prefix:
    """A request's prefix: every (position, head) has a K and a V row; `kept` and `present` are bool `[P, H]`."""

    k: torch.Tensor
    v: torch.Tensor
    kept: torch.Tensor
    present: torch.Tensor


def extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix: Prefix,
    prefix_seen: torch.Tensor,
    chunk_seen: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """fp64 `[T, Hq, D]`: masks bool `[H, T, P]` and `[H, T, T]` say what each query sees."""
    group = q.shape[1] // k.shape[1]
    heads = []
    for h in range(k.shape[1]):
        keys, values = torch.cat((prefix.k[:, h], k[:, h])), torch.cat((prefix.v[:, h], v[:, h]))
        mask = torch.cat((prefix_seen[h], chunk_seen[h]), dim=1)
        for g in range(group):
            heads.append(attend(q[:, h * group + g], keys, values, mask, scale)[0])
    return torch.stack(heads, dim=1)
