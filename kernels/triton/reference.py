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
    dense_from: torch.Tensor,
    out: VisibleChunks,
    longest: int,
) -> None:
    """See `visible.visible_chunks`."""
    chunk = out.cells.shape[2]
    mask = CELL_MASK if out.positions is None else -1
    for b, length in enumerate(lengths.tolist()):
        entries = table[req_to_token[rows[b], :length].long()]
        position = torch.arange(length, device=table.device, dtype=torch.int32)
        visible = (entries >= 0) & ((entries < CONDEMNED) | (position >= dense_from[b])[:, None])
        for j, start in enumerate(range(0, length, chunk)):
            at, part = int(out.first[b]) + j, visible[start : start + chunk]
            out.counts[at] = part.sum(dim=0)
            for head in range(table.shape[1]):
                where = start + part[:, head].nonzero().flatten()
                out.cells[at, head, : len(where)] = entries[where, head] & mask
                if out.positions is not None:
                    out.positions[at, head, : len(where)] = position[where]


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


def extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    prefix: VisibleChunks,
    starts: torch.Tensor,
    q_indptr: torch.Tensor,
    scale: float,
    window: int,
    kept: torch.Tensor | None,
    out: torch.Tensor,
    longest_chunk: int,
) -> None:
    """See `extend.extend`."""
    heads = prefix.cells.shape[1]
    group = q.shape[1] // heads
    first, bounds = prefix.first.tolist(), q_indptr.tolist()
    for b in range(len(bounds) - 1):
        own = slice(bounds[b], bounds[b + 1])
        query = int(starts[b]) + torch.arange(own.stop - own.start, device=q.device)
        for head in range(heads):
            chunks = [(c, int(prefix.counts[c, head])) for c in range(first[b], first[b + 1])]
            entries = torch.cat([prefix.cells[c, head, :n] for c, n in chunks] or [prefix.counts[:0, head]])
            cells = (entries & CELL_MASK).long()
            seen = torch.ones(len(query), len(cells), dtype=torch.bool, device=q.device)
            causal = query[:, None] >= query[None, :]
            if kept is not None and prefix.positions is not None:
                position = torch.cat([prefix.positions[c, head, :n] for c, n in chunks] or [prefix.counts[:0, head]])
                seen = (entries < CONDEMNED)[None, :] | (query[:, None] - position[None, :] <= window)
                causal &= kept[own, head].bool()[None, :] | (query[:, None] - query[None, :] <= window)
            keys = torch.cat([k_pool[cells].float(), k[own, head].float()])
            values = torch.cat([v_pool[cells].float(), v[own, head].float()])
            for g in range(head * group, (head + 1) * group):
                scores = q[own, g].float() @ keys.T * scale
                scores = scores.masked_fill(~torch.cat([seen, causal], dim=1), -torch.inf)
                out[own, g] = (scores.softmax(dim=1) @ values).to(out.dtype)
