"""Attention of one request's chunk of new tokens over its pruned prefix and over itself.

torch's CPU flash attention returns the log-sum-exp, so a chunk's attention is put together from parts:
`o = sum_i o_i exp(lse_i - lse)`, `lse = log sum_i exp(lse_i)`. No part is quadratic in the prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from ..encoding import VisibleCells

QUERY_BLOCK = 128
"""Query positions per block of sparse extend: a block's mask has at most this many rows."""

_Part = tuple[torch.Tensor, torch.Tensor]


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> _Part:
    """Output fp32 `[b, h, t, D]` and lse fp32 `[b, h, t]` (natural log)."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out.float(), lse.float().view(out.shape[:3])


def _merge(a: _Part, b: _Part) -> _Part:
    lse = torch.logaddexp(a[1], b[1])
    weight_a, weight_b = (a[1] - lse).exp().unsqueeze(-1), (b[1] - lse).exp().unsqueeze(-1)
    return a[0] * weight_a + b[0] * weight_b, lse


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleCells) -> None:
    tokens, heads, dim = k.shape
    if v.shape != k.shape or q.shape[0] != tokens or q.shape[2] != dim or q.shape[1] % heads != 0:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not belong together")
    if visible.indptr.numel() != heads + 1:
        raise ValueError(f"the prefix of one request has {heads} segments, got {visible.indptr.numel() - 1}")


def _by_head(q: torch.Tensor, heads: int) -> torch.Tensor:
    """`[T, Hq, D]` to `[H, G, T, D]`, contiguous."""
    tokens, q_heads, dim = q.shape
    return q.view(tokens, heads, q_heads // heads, dim).permute(1, 2, 0, 3).contiguous()


def _by_token(out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `_by_head`, in `dtype`."""
    heads, group, tokens, dim = out.shape
    return out.permute(2, 0, 1, 3).reshape(tokens, heads * group, dim).to(dtype)


def _extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: VisibleCells,
    attend: Callable[[torch.Tensor, list[slice]], torch.Tensor],
) -> torch.Tensor:
    """What both rules share: the checks, nothing to do for no token, and q's layout.

    attend: from q `[H, G, T, D]` and each head's part of `visible` to the output of q's shape.
    """
    _check(q, k, v, visible)
    if k.shape[0] == 0:
        return torch.empty_like(q)
    parts = [slice(*bounds) for bounds in pairwise(visible.indptr.tolist())]
    return _by_token(attend(_by_head(q, k.shape[1]), parts), q.dtype)


def extend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    visible: VisibleCells,
    scale: float,
) -> torch.Tensor:
    """Causal attention of a chunk whose every query sees all of `visible` and the chunk's tokens up to itself.

    q: fp32 or bf16 `[T, Hq, D]`. k, v: `[T, H, D]`, the chunk's own.
    k_pool, v_pool: `[N, D]`.
    visible: the cells of the request's prefix (B = 1), the same for all queries; heads may be empty.

    Returns `[T, Hq, D]` of q's dtype. Raises ValueError for shapes that do not fit.
    """

    def attend(queries: torch.Tensor, parts: list[slice]) -> torch.Tensor:
        heads, group, tokens, dim = queries.shape
        chunk_k, chunk_v = (x.transpose(0, 1).unsqueeze(1).expand(heads, group, tokens, dim) for x in (k, v))
        out, lse = _flash(queries, chunk_k, chunk_v, scale, causal=True)
        for h, part in enumerate(parts):
            if part.start == part.stop:
                continue
            cells = visible.cells[part]
            prefix_k, prefix_v = (pool.index_select(0, cells)[None, None] for pool in (k_pool, v_pool))
            prefix, prefix_lse = _flash(queries[h].view(1, 1, group * tokens, dim), prefix_k, prefix_v, scale)
            out[h], lse[h] = _merge((out[h], lse[h]), (prefix.view(group, tokens, dim), prefix_lse.view(group, tokens)))
        return out

    return _extend(q, k, v, visible, attend)


def extend_sparse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    visible: VisibleCells,
    kept: torch.Tensor,
    first_position: int,
    window: int,
    scale: float,
) -> torch.Tensor:
    """Attention of a chunk under the decode rule: a query at t sees a key at i <= t iff t - i <= window or i is kept.

    q, k, v, k_pool, v_pool: as in `extend_dense`.
    visible: the prefix cells that the first query sees (B = 1), with `positions` and `condemned`.
    kept: bool `[T, H]`, decisions of the chunk's own tokens.
    first_position: position of the chunk's first token.
    window: w, in tokens.

    Returns `[T, Hq, D]` of q's dtype. Raises ValueError for shapes that do not fit and where `visible` has no details.
    """
    all_positions, all_condemned = visible.positions, visible.condemned
    if all_positions is None or all_condemned is None:
        raise ValueError("extend_sparse needs visible_cells(..., detail=True)")
    if kept.shape != k.shape[:2] or kept.dtype != torch.bool:
        raise ValueError(f"kept must be bool {tuple(k.shape[:2])}, got {kept.dtype} {tuple(kept.shape)}")

    def attend(queries: torch.Tensor, parts: list[slice]) -> torch.Tensor:
        out = torch.empty(queries.shape, dtype=torch.float32)
        own_positions = torch.arange(first_position, first_position + k.shape[0], dtype=torch.int32)
        for h, part in enumerate(parts):
            cells = visible.cells[part]
            keys = torch.cat((k_pool.index_select(0, cells), k[:, h]))
            values = torch.cat((v_pool.index_select(0, cells), v[:, h]))
            positions = torch.cat((all_positions[part], own_positions))
            always = torch.cat((all_condemned[part] == 0, kept[:, h]))
            _sparse_head(queries[h], keys, values, positions, always, first_position, window, scale, out[h])
        return out

    return _extend(q, k, v, visible, attend)


def _sparse_head(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    always: torch.Tensor,
    first_position: int,
    window: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """One KV head, block of queries by block: q `[G, T, D]`, keys and values `[n, D]` of ascending `positions` `[n]`.

    Keys that no query of a block can see are dropped first, so the work follows what is visible.
    """
    tokens = q.shape[1]
    for begin in range(0, tokens, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, tokens)
        first, last = first_position + begin, first_position + end - 1
        near = positions >= first - window
        old = torch.nonzero(always & (positions < first)).flatten()
        recent = torch.nonzero((near & ~always | (positions >= first)) & (positions <= last)).flatten()
        age = torch.arange(first, last + 1, dtype=torch.int32)[:, None] - positions[recent]
        seen = (age >= 0) & ((age <= window) | always[recent])
        mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
        block = q[None, :, begin:end]
        result = _flash(block, *_rows(keys, values, recent, q.shape[0]), scale, mask=mask[None, None])
        if old.numel():
            result = _merge(result, _flash(block, *_rows(keys, values, old, q.shape[0]), scale))
        out[:, begin:end] = result[0][0]


def _rows(keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor, group: int) -> _Part:
    """The chosen rows of both as `[1, G, n, D]`, G times the same memory."""
    k, v = (x.index_select(0, index)[None, None].expand(1, group, -1, -1) for x in (keys, values))
    return k, v
