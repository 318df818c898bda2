"""Plain torch forms of the Triton kernels: same signatures, same results."""

from __future__ import annotations

import torch

from ..encoding import CELL_MASK, CONDEMNED
from .visible import VisibleChunks


def visible_chunks(
    table: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    window: int,
    out: VisibleChunks,
    longest: int,
) -> None:
    """See `visible.visible_chunks`."""
    chunk = out.cells.shape[2]
    for b, length in enumerate(lengths.tolist()):
        entries = table[req_to_token[rows[b], :length].long()]
        in_window = torch.arange(length, device=table.device) >= length - 1 - window
        visible = (entries >= 0) & ((entries < CONDEMNED) | in_window[:, None])
        for j, part in enumerate(visible.split(chunk)):
            at = int(out.first[b]) + j
            out.counts[at] = part.sum(dim=0)
            for head in range(table.shape[1]):
                found = entries[j * chunk : j * chunk + len(part), head][part[:, head]] & CELL_MASK
                out.cells[at, head, : len(found)] = found


def chunked_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    visible: VisibleChunks,
    scale: float,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    longest: int,
) -> None:
    """See `decode.chunked_decode`; leaves the scratch alone."""
    heads = visible.cells.shape[1]
    grouped = q.reshape(len(q), heads, -1, q.shape[2])
    first = visible.first.tolist()
    for b in range(len(q)):
        for head in range(heads):
            chunks = range(first[b], first[b + 1])
            lists = [visible.cells[c, head, : int(visible.counts[c, head])] for c in chunks]
            cells = torch.cat(lists).long() if lists else torch.empty(0, dtype=torch.int64, device=q.device)
            scores = grouped[b, head].float() @ k_pool[cells].float().T * scale
            where = slice(head * grouped.shape[2], (head + 1) * grouped.shape[2])
            lse[b, where] = scores.logsumexp(dim=1)
            out[b, where] = (scores.softmax(dim=1) @ v_pool[cells].float()).to(out.dtype)


def write_cells(
    table: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    scores: torch.Tensor,
    limits: torch.Tensor,
    kept: torch.Tensor,
    fault: torch.Tensor,
) -> None:
    """See `write.write_cells`."""
    entries = table[slots.long()]
    owned = entries >= 0
    if bool((~owned & (slots != 0)[:, None]).any()):
        fault.fill_(1)
    condemned = scores.float() < limits[:, None]
    token, head = torch.nonzero(owned & condemned, as_tuple=True)
    table[slots[token].long(), head] = entries[token, head] | CONDEMNED
    kept.copy_(~condemned)
    cells = (entries[owned] & CELL_MASK).long()
    k_pool[cells] = k[owned].to(k_pool.dtype)
    v_pool[cells] = v[owned].to(v_pool.dtype)
