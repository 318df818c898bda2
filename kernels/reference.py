"""Plain torch forms of the C++ kernels: same signatures, same results. Used by tests and where nothing can be compiled.

They are correct and free of surprises, not fast: `ragged_decode` visits one (request, KV head) at a time.
"""

from __future__ import annotations

import torch

from .encoding import CELL_MASK, CONDEMNED, VisibleCells


def check_slots(slots: torch.Tensor, table_slots: int) -> None:
    """Raise IndexError naming the first of `slots` outside a table of `table_slots` rows."""
    outside = (slots < 0) | (slots >= table_slots)
    if bool(outside.any()):
        slot = int(slots[outside][0])
        raise IndexError(f"token slot {slot} is outside the cell table of {table_slots} slots")


def visible_cells(
    table: torch.Tensor,
    slots: torch.Tensor,
    slot_indptr: torch.Tensor,
    dense_from: torch.Tensor,
    detail: bool = False,
) -> VisibleCells:
    """Cells that one query of each of B requests sees, per KV head of one layer.

    An entry is visible iff it names a cell and (is not condemned, or its position is at least `dense_from[b]`).

    table: int32 `[S, H]`, one layer's cell table (entries as in `encoding`).
    slots: int64 `[T]`, the token slots of all requests, each request's in position order.
    slot_indptr: int64 `[B + 1]`; request b has `slots[slot_indptr[b]:slot_indptr[b + 1]]`, positions from 0.
    dense_from: int64 `[B]`, first position of the window (of everything visible whatever its score).
    detail: also fill `positions` and `condemned`.

    Raises IndexError, naming the slot, if a slot is outside the table.
    """
    check_slots(slots, table.shape[0])
    heads, requests = table.shape[1], slot_indptr.numel() - 1
    lengths = slot_indptr.diff()
    request = torch.repeat_interleave(torch.arange(requests), lengths)
    positions = torch.arange(slots.numel()) - slot_indptr[:-1][request]
    entries = table[slots]
    in_window = (positions >= dense_from[request])[:, None]
    condemned = (entries >= 0) & ((entries & CONDEMNED) != 0)
    token, head = torch.nonzero((entries >= 0) & (~condemned | in_window), as_tuple=True)
    segment = request[token] * heads + head
    order = torch.argsort(segment, stable=True)
    token, head, segment = token[order], head[order], segment[order]
    indptr = torch.zeros(requests * heads + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(segment, minlength=requests * heads).cumsum(0)
    cells = entries[token, head] & CELL_MASK
    if not detail:
        return VisibleCells(indptr, cells)
    return VisibleCells(indptr, cells, positions[token].to(torch.int32), condemned[token, head].to(torch.uint8))


def ragged_decode(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, visible: VisibleCells, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query per request over its visible cells, with fp32 accumulation.

    q: fp32 or bf16 `[B, Hq, D]`; query heads `h * G .. h * G + G - 1` use KV head h, G = Hq / H.
    k_pool, v_pool: `[N, D]` of q's dtype.
    visible: segments of B requests by H heads.

    Returns (out `[B, Hq, D]` of q's dtype, lse fp32 `[B, Hq]`, natural log of the sum of exponentials). An empty
    segment gives out 0 and lse -inf.

    Raises ValueError or TypeError for shapes and dtypes that do not fit, IndexError for a cell outside the pools.
    """
    batch, q_heads, dim = q.shape
    heads = (visible.indptr.numel() - 1) // max(batch, 1)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((batch, q_heads), float("-inf"), dtype=torch.float32)
    if batch == 0 or heads == 0:
        return out, lse
    group = q_heads // heads
    queries = q.reshape(batch * heads, group, dim).float() * scale
    bounds = visible.indptr.tolist()
    for s in range(batch * heads):
        if bounds[s] == bounds[s + 1]:
            continue
        cells = visible.cells[bounds[s] : bounds[s + 1]].long()
        scores = queries[s] @ k_pool[cells].float().T
        mass = scores.logsumexp(dim=1)
        lse.view(-1, group)[s] = mass
        out.view(-1, group, dim)[s] = ((scores - mass[:, None]).exp() @ v_pool[cells].float()).to(q.dtype)
    return out, lse


def write_cells(
    table: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> None:
    """Store the K and V rows of new tokens in the cells of their slots. Nothing is written if it raises.

    table: int32 `[S, H]`, one layer's cell table.
    slots: int64 `[T]`, without duplicates.
    k, v: `[T, H, D]`, converted to the pools' dtype.
    k_pool, v_pool: `[N, D]`.

    Raises IndexError for a slot outside the table, RuntimeError naming the slot and head where there is no cell, or
    one outside the pool.
    """
    check_slots(slots, table.shape[0])
    entries = table[slots]
    bad = torch.nonzero((entries < 0) | ((entries & CELL_MASK) >= k_pool.shape[0]))
    if bad.numel():
        token, head = bad[0].tolist()
        raise RuntimeError(no_cell_message(int(slots[token]), head, int(entries[token, head]), k_pool.shape[0]))
    cells = (entries & CELL_MASK).flatten().long()
    k_pool.index_copy_(0, cells, k.reshape(-1, k.shape[-1]).to(k_pool.dtype))
    v_pool.index_copy_(0, cells, v.reshape(-1, v.shape[-1]).to(v_pool.dtype))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias` of bf16 tensors, summed in fp32 and rounded once.

    x: `[m, k]`. weight: `[n, k]`. bias: `[n]` or None. Returns `[m, n]` of x's dtype.
    """
    wide_bias = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight.float(), wide_bias).to(x.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`s / sqrt(mean(s^2) + epsilon) * weight` of the rows `s = x + residual`, in fp32, rounded once.

    x, residual: bf16 `[n, width]`; residual may be None. weight: bf16 `[width]`. Returns that and s, of x's dtype.
    """
    wide = x.float() if residual is None else x.float() + residual.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return (normed * weight.float()).to(x.dtype), wide.to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of whole heads, halves paired (NeoX style), in fp32, rounded once.

    x: bf16 `[n, heads * dim]`. positions: int64 `[n]`. cos_sin: bf16 `[positions, dim]`, cosines then sines.
    Returns `[n, heads * dim]`, contiguous. Raises IndexError for a position outside `cos_sin`.
    """
    outside = positions[(positions < 0) | (positions >= len(cos_sin))]
    if len(outside):
        raise no_angle(int(outside[0]), len(cos_sin))
    cosine, sine = cos_sin[positions].float()[:, None].chunk(2, dim=-1)
    dim = cos_sin.shape[1]
    a, b = x.reshape(len(x), x.shape[1] // dim, dim).float().chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).to(x.dtype).view(x.shape)


def no_angle(position: int, rows: int) -> IndexError:
    """The error of a position without a cosine."""
    return IndexError(f"position {position} is outside the rotary cache of {rows} positions")


def no_cell_message(slot: int, head: int, entry: int, pool_rows: int) -> str:
    """Text of the error of a write to an entry without a usable cell."""
    if entry < 0:
        return f"token slot {slot} has no cell for KV head {head}: it was never allocated, or is pruned"
    return f"token slot {slot}, KV head {head}: cell {entry & CELL_MASK} is outside the pool of {pool_rows} rows"
