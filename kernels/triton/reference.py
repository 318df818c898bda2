"""Plain torch forms of the Triton kernels: same signatures, same results."""

from __future__ import annotations

import torch

from ..bits import pack_bits
from ..counters import FAULT, FREE, HOMELESS, OVERFLOW, PRUNED, UNDERFLOW
from ..encoding import CELL_MASK, CONDEMNED, NONE
from .visible import VisibleChunks, first_chunks


def visible_chunks(
    table: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    dense_from: torch.Tensor,
    out: VisibleChunks,
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


def place_chunks(lengths: torch.Tensor, chunk: int, window: int, first: torch.Tensor, dense_from: torch.Tensor) -> None:
    """See `visible.place_chunks`."""
    first_chunks(lengths, chunk, first)
    dense_from.copy_(lengths - 1 - window)


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
    counters: torch.Tensor,
) -> None:
    """See `write.write_cells`."""
    entries = table[slots.long()]
    owned = entries >= 0
    if bool((~owned & (slots != 0)[:, None]).any()):
        counters[FAULT] |= HOMELESS
    condemned = scores.float() < limits[:, None]
    token, head = torch.nonzero(owned & condemned & (slots != 0)[:, None], as_tuple=True)
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
    begins: torch.Tensor,
    tokens: torch.Tensor,
    scale: float,
    window: int,
    kept: torch.Tensor | None,
    out: torch.Tensor,
    longest_chunk: int,
) -> None:
    """See `extend.extend`."""
    heads = prefix.cells.shape[1]
    group = q.shape[1] // heads
    first = prefix.first.tolist()
    for b, (begin, length) in enumerate(zip(begins.tolist(), tokens.tolist(), strict=True)):
        own = slice(begin, begin + length)
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


def take_cells(table: torch.Tensor, slots: torch.Tensor, stack: torch.Tensor, counters: torch.Tensor) -> None:
    """See `cells.take_cells`."""
    layers, _, heads = table.shape
    free, need = int(counters[FREE]), slots.numel() * layers * heads
    top = stack[max(0, free - need) : free].flip(0)
    cells = torch.full((need,), NONE, dtype=torch.int32, device=table.device)
    cells[: len(top)] = top
    table[:, slots.long()] = cells.view(layers, heads, -1).permute(0, 2, 1)
    counters[FREE] = max(0, free - need)
    if need > free:
        counters[FAULT] |= UNDERFLOW


def free_cells(
    table: torch.Tensor,
    slots: torch.Tensor,
    stack: torch.Tensor,
    counters: torch.Tensor,
    *,
    settle: bool,
    req_to_token: torch.Tensor | None = None,
) -> None:
    """See `cells.free_cells`."""
    if req_to_token is not None:
        slots = req_to_token[slots[0].long(), slots[1].long()]
    where = slots.long().unique()
    entries = table[:, where]
    going = entries >= (CONDEMNED if settle else 0)
    table[:, where] = entries.masked_fill(going, NONE)
    cells, free = entries[going] & CELL_MASK, int(counters[FREE])
    fitting = cells[: max(0, len(stack) - free)]
    stack[free : free + len(fitting)] = fitting
    counters[FREE] += len(cells)
    if len(cells) > len(fitting):
        counters[FAULT] |= OVERFLOW
    if settle:
        counters[PRUNED] += len(cells)


def step_report(kept: torch.Tensor, counters: torch.Tensor, out: torch.Tensor) -> None:
    """See `report.step_report`."""
    out.copy_(torch.cat([counters.view(torch.uint8), pack_bits(kept != 0).flatten()]))


def mlp_scores(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """See `score.mlp_scores`."""
    active = torch.nn.functional.gelu(hidden.float()).to(hidden.dtype)
    out.copy_(active.float() @ weight.float().T + bias.float())


def compact_lists(visible: VisibleChunks, indptr: torch.Tensor, indices: torch.Tensor) -> None:
    """See `compact.compact_lists`."""
    first, heads, at = visible.first.tolist(), visible.cells.shape[1], 0
    indptr[0] = 0
    for segment in range(heads * (len(first) - 1)):
        b, head = divmod(segment, heads)
        for c in range(first[b], first[b + 1]):
            count = int(visible.counts[c, head])
            indices[at : at + count] = visible.cells[c, head, :count] & CELL_MASK
            at += count
        indptr[segment + 1] = at
