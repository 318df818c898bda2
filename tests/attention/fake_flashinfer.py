"""FlashInfer's wrappers in plain torch: the part of their interface that we use, and what it asks for.

Lists are read from the page tables that a wrapper holds when it runs, not from those that were planned.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch

calls: list[str] = []
"""Names of the wrappers' methods, as they were called."""


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one request: q `[n, Hq, D]`; k, v `[m, H, D]`. LSE to base 2; 0 and -inf where there is no key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).float() for x in (k, v))
    scores = torch.einsum("nhd,mhd->nhm", q.float(), k) * scale
    if causal:
        future = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        scores = scores.masked_fill(future[:, None], -torch.inf)
    return torch.einsum("nhm,mhd->nhd", scores.softmax(dim=2), v), scores.logsumexp(dim=2) / math.log(2)


class Wrapper:
    """What all three have in common."""

    def __init__(self, floats: torch.Tensor, kv_layout: str, **options: Any) -> None:
        assert floats.dtype == torch.uint8 and kv_layout == "NHD"
        self.options, self._floats, self._ints = options, floats, torch.empty(0, dtype=torch.uint8)

    def reset_workspace_buffer(self, floats: torch.Tensor, ints: torch.Tensor) -> None:
        assert floats is self._floats and ints.dtype == torch.uint8
        self._ints = ints

    def _planned(self, rows: list[int], heads: tuple[int, int], dim: int, scale: float, dtypes: set[Any]) -> None:
        calls.append(f"{type(self).__name__}.plan")
        self._heads, self._dim, self._scale, (self._dtype,) = heads, dim, scale, dtypes
        self._rows = rows
        tiles = sum(-(-(b - a) * heads[0] // heads[1] // 16) for a, b in pairwise(rows)) * heads[1]
        assert self._ints.numel() >= 12 * tiles + 4 * len(rows)

    def _checked(self, q: torch.Tensor, out: torch.Tensor) -> None:
        calls.append(f"{type(self).__name__}.run")
        assert q.shape == out.shape == (self._rows[-1], self._heads[0], self._dim) and q.stride(2) == 1
        assert q.dtype == out.dtype == self._dtype and out.is_contiguous()
        out.fill_(torch.nan)


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, *, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int, causal: bool, sm_scale: float, q_data_type: Any, kv_data_type: Any, disable_split_kv: bool,
    ) -> None:  # fmt: skip
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32 and torch.equal(qo_indptr, kv_indptr) and causal
        heads = (num_qo_heads, num_kv_heads)
        self._planned(qo_indptr.tolist(), heads, head_dim_qk, sm_scale, {q_data_type, kv_data_type})

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._checked(q, out)
        assert k.shape == v.shape == (len(q), self._heads[1], self._dim)
        lse = torch.full(q.shape[:2], torch.nan)
        for a, b in pairwise(self._rows):
            out[a:b], lse[a:b] = attended(q[a:b], k[a:b], v[a:b], self._scale, causal=True)
        return out, lse


class Paged(Wrapper):
    """Page tables of one token per page."""

    def _paged(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, page_size: int) -> None:
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32 and page_size == 1
        assert (last == 1).all() and len(last) == len(indptr) - 1
        self._bounds = indptr.diff()
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr.clone(), indices
        self._paged_kv_last_page_len_buf = last

    def _attend(self, q: torch.Tensor, cache: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        self._checked(q, out)
        k, v = cache
        assert k.shape[1:] == v.shape[1:] == (1, self._heads[1], self._dim) and k.stride() == v.stride()
        lse, indptr = torch.full(q.shape[:2], torch.nan), self._paged_kv_indptr_buf.tolist()
        for n, (a, b) in enumerate(pairwise(self._rows)):
            pages = self._paged_kv_indices_buf[indptr[n] : indptr[n + 1]].long()
            out[a:b], lse[a:b] = attended(q[a:b], k[pages, 0], v[pages, 0], self._scale, causal=False)
        return lse


class BatchPrefillWithPagedKVCacheWrapper(Paged):
    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, *, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, causal: bool, sm_scale: float, q_data_type: Any, kv_data_type: Any, disable_split_kv: bool,
    ) -> None:  # fmt: skip
        assert disable_split_kv and not causal and self.options == {"backend": "fa2"}
        heads = (num_qo_heads, num_kv_heads)
        self._planned(qo_indptr.tolist(), heads, head_dim_qk, sm_scale, {q_data_type, kv_data_type})
        self._paged(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)

    def run(
        self, q: torch.Tensor, cache: tuple[torch.Tensor, ...], *, out: torch.Tensor, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return out, self._attend(q, cache, out)


class BatchDecodeWithPagedKVCacheWrapper(Paged):
    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, *, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, sm_scale: float, q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        assert self.options == {"backend": "fa2", "use_tensor_cores": True}
        rows = list(range(len(indptr)))
        self._planned(rows, (num_qo_heads, num_kv_heads), head_dim, sm_scale, {q_data_type, kv_data_type})
        self._paged(indptr, indices, last_page_len, page_size)

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, ...], *, out: torch.Tensor) -> torch.Tensor:
        assert (self._paged_kv_indptr_buf.diff() <= self._bounds).all(), "a longer list than was planned"
        self._attend(q, cache, out)
        return out


def merge_state_in_place(v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor) -> None:
    """Of two LSE to base 2. A block of the kernel holds all heads of a row."""
    assert v.shape == v_other.shape and s.shape == s_other.shape == v.shape[:2] and s.dtype == torch.float32
    assert all(x.is_contiguous() for x in (v, s, v_other, s_other))
    assert v.shape[1] * v.shape[2] // max(16 // v.element_size(), v.shape[2] // 32) <= 1024
    merged = torch.logaddexp2(s, s_other)
    weight, other = (torch.exp2(x - merged).nan_to_num()[:, :, None] for x in (s, s_other))
    v.copy_(weight * v + other * v_other)
    s.copy_(merged)
