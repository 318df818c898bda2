"""FlashInfer's wrappers over heads that keep different cells, planned once per step.

FlashInfer reads one page table per request, for all its heads. Here every (request, KV head) is a request of its own
to it, with pages of one token: queries are put in that order, and the pool is a cache of one head. A chunk's own tokens
need none of this: no head of a dense chunk misses any.

A step is planned before any layer knows its lists. What is planned for a prefix with `disable_split_kv` depends on the
numbers of queries only; what is planned for single queries may be run with shorter lists than were planned.
`tests/attention/test_flashinfer_plan.py` shows both with FlashInfer's own planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvzap_sglang.attention.choice import FLAG
from kvzap_sglang.attention.device_lists import QueryGroup
from kvzap_sglang.attention.metadata import Piece
from kvzap_sglang.guard import GuardError
from kvzap_sglang.kernels.triton import VisibleChunks, compact_lists
from kvzap_sglang.to_device import to_device

FLASHINFER_VERSION = "0.7.2"
REMEDY = f"pip install flashinfer-python=={FLASHINFER_VERSION}, or give {FLAG} triton"
PRIVATE = ("_paged_kv_indptr_buf", "_paged_kv_indices_buf")
"""Attributes in which a planned wrapper keeps its page table. Nothing public exchanges it without a new plan."""
FLOAT_BYTES = 16 << 20
"""Parts of split lists: two per multiprocessor, 16 rows each. Prompts split none."""
MERGE_THREADS = 1024
"""Of a block of FlashInfer's merge, which takes all heads of a row."""


class Heads(NamedTuple):
    """Heads of one rank. group: query heads of a KV head. dtype: of queries, keys and values."""

    kv: int
    group: int
    dim: int
    dtype: torch.dtype

    @property
    def query(self) -> int:
        return self.kv * self.group

    @property
    def scale(self) -> float:
        """Of the scores, as planned."""
        return float(self.dim**-0.5)

    def plan_options(self, *, flat: bool) -> dict[str, Any]:
        """Arguments of every plan. flat: each KV head is a request of its own."""
        query, kv = (self.group, 1) if flat else (self.query, self.kv)
        heads = {"num_qo_heads": query, "num_kv_heads": kv}
        return {**heads, "sm_scale": self.scale, "q_data_type": self.dtype, "kv_data_type": self.dtype}


class PageTable(NamedTuple):
    """What `compact_lists` fills, anew for every layer. indptr: int32 `[B * H + 1]`. indices: int32 `[capacity]`."""

    indptr: torch.Tensor
    indices: torch.Tensor


class Wrapper:
    """A FlashInfer wrapper that is planned once per step.

    A plan is written into one buffer on the host whose copy to the device is only started: the next plan waits until
    it is done, which it is as a rule, since the step before has begun by then.
    """

    def __init__(self, wrapper: Any, floats: torch.Tensor) -> None:
        """floats: uint8, the float workspace, which wrappers used on one stream may share."""
        self.run = wrapper.run
        self._wrapper, self._floats, self._room = wrapper, floats, 0
        self._indices = torch.zeros(0, dtype=torch.int32, device=floats.device)
        self._copied = torch.cuda.Event() if floats.is_cuda else None

    def plan(self, room: int, *args: npt.NDArray[Any] | torch.Tensor, **kwargs: Any) -> None:
        """room: bytes that the plan takes at most. Arrays become int32 tensors on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        if room > self._room:
            self._room = _power_of_2(room)
            ints = torch.empty(self._room, dtype=torch.uint8, device=self._floats.device)
            self._wrapper.reset_workspace_buffer(self._floats, ints)
        self._wrapper.plan(*map(self._on_host, args), **kwargs)
        if self._copied is not None:
            self._copied.record()

    def plan_flat(
        self, room: int, before: Sequence[npt.NDArray[Any]], bounds: npt.NDArray[Any], **kw: Any
    ) -> PageTable:
        """Plan lists of at most `bounds` cells, int `[B * H]`, and have the wrapper read a page table that is ours.

        before: further arrays that the plan takes. Raises `GuardError` where the wrapper keeps no such table.
        """
        device, cells = self._floats.device, max(1, int(bounds.sum()))
        if cells > len(self._indices):
            # Zeros: a wrapper that reads a table of its own instead finds cells there, and not some address.
            self._indices = torch.zeros(_power_of_2(cells), dtype=torch.int32, device=device)
        table = PageTable(torch.empty(len(bounds) + 1, dtype=torch.int32, device=device), self._indices)
        self.plan(room, *before, indptr_of(bounds), self._indices, np.ones_like(bounds), page_size=1, **kw)
        missing = [name for name in PRIVATE if not isinstance(getattr(self._wrapper, name, None), torch.Tensor)]
        if missing:
            raise GuardError(
                f"{FLAG} flashinfer exchanges page tables that this flashinfer does not keep "
                f"({', '.join(missing)} of {type(self._wrapper).__name__}): {REMEDY}"
            )
        for name, tensor in zip(PRIVATE, table, strict=True):
            setattr(self._wrapper, name, tensor)
        return table

    def _on_host(self, values: npt.NDArray[Any] | torch.Tensor) -> torch.Tensor:
        if isinstance(values, torch.Tensor):
            return values
        tensor = torch.from_numpy(values.astype(np.int32))
        return tensor.pin_memory() if self._floats.is_cuda else tensor


class DensePrompts:
    """Attention of a step's dense chunks: each chunk by itself, its prefix per KV head, and the two merged.

    Both parts, and FlashInfer's merge, count in logarithms to base 2.

    Attributes:
        heads: what is planned for.
    """

    def __init__(self, flashinfer: Any, heads: Heads, device: torch.device) -> None:
        floats = torch.empty(FLOAT_BYTES, dtype=torch.uint8, device=device)
        # Hopper's kernels plan a schedule from all lengths, so they fit the chunk, which is the same in every layer.
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        ragged, paged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._chunk = Wrapper(ragged(floats, "NHD", backend="auto" if hopper else "fa2"), floats)
        self._prefix = Wrapper(paged(floats, "NHD", backend="fa2"), floats)
        self._merge = flashinfer.merge_state_in_place
        self.heads, self._device = heads, device
        self._begins: torch.Tensor | None = None
        self._tokens: slice | torch.Tensor = slice(0)
        self._table: PageTable | None = None
        self._order = torch.empty(0)

    def plan(self, pieces: Sequence[Piece], group: QueryGroup) -> None:
        """Plan a step for every layer. pieces: of `group`."""
        heads = self.heads
        lengths = np.array([piece.end - piece.start for piece in pieces], np.int64)
        bounds = np.repeat([piece.start for piece in pieces], heads.kv)
        tokens = np.concatenate([piece.token + np.arange(n) for piece, n in zip(pieces, lengths, strict=True)])
        room = plan_bytes(len(tokens), heads.query, len(pieces))
        options = {"head_dim_qk": heads.dim, "disable_split_kv": True}
        begins = indptr_of(lengths)
        self._chunk.plan(room, begins, begins, causal=True, **options, **heads.plan_options(flat=False))
        in_a_row = tokens[-1] - tokens[0] == len(tokens) - 1
        first = int(tokens[0])
        self._tokens = slice(first, first + len(tokens)) if in_a_row else to_device(tokens, self._device)
        self._table = None
        if bounds.any():
            rows = indptr_of(np.repeat(lengths, heads.kv))
            options |= {"causal": False, **heads.plan_options(flat=True)}
            self._table = self._prefix.plan_flat(room, [rows], bounds, **options)
            self._order = to_device(head_order(lengths, tokens, heads.kv), self._device)
        self._begins = group.begins

    def planned(self, group: QueryGroup, scale: float) -> bool:
        """Whether it can attend this group with scores of this scale."""
        return self._begins is group.begins and scale == self.heads.scale

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        prefix: VisibleChunks,
        out: torch.Tensor,
    ) -> None:
        """One layer, as `kernels.triton.extend` (dense) has it."""
        at = self._tokens
        query = q[at]
        part = out[at] if isinstance(at, slice) else torch.empty_like(query, memory_format=torch.contiguous_format)
        _, lse = self._chunk.run(query, k[at], v[at], out=part, return_lse=True)
        if self._table is not None:
            compact_lists(prefix, *self._table)
            self._merge(*self._mergeable(part, lse), *self._mergeable(*self._attend_prefix(q, k_pool, v_pool)))
        if not isinstance(at, slice):
            out[at] = part

    def _attend_prefix(
        self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE, in the order of the tokens; 0 and -inf where a head sees nothing."""
        token, head, back = self._order
        flat = q.unflatten(1, (self.heads.kv, self.heads.group))[token, head]
        pools = tuple(pool[:, None, None] for pool in (k_pool, v_pool))
        out, lse = self._prefix.run(flat, pools, out=torch.empty_like(flat), return_lse=True)
        return out[back].view(-1, self.heads.query, self.heads.dim), lse[back].view(-1, self.heads.query)

    def _mergeable(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of all query heads, or of one KV head's where a block would have too many threads."""
        heads = self.heads
        per_head = heads.dim // max(16 // out.element_size(), heads.dim // 32)
        rows = heads.query if heads.query * per_head <= MERGE_THREADS else heads.group
        return out.view(-1, rows, heads.dim), lse.view(-1, rows)


class SingleQueries:
    """Attention of a step's queries that are alone in their piece, planned with the longest lists they can have.

    Attributes:
        heads: what is planned for.
    """

    def __init__(self, flashinfer: Any, heads: Heads, device: torch.device) -> None:
        floats = torch.zeros(FLOAT_BYTES, dtype=torch.uint8, device=device)
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        self._wrapper = Wrapper(decode(floats, "NHD", use_tensor_cores=True, backend="fa2"), floats)
        self.heads = heads
        self._begins: torch.Tensor | None = None
        self._table: PageTable | None = None

    def plan(self, pieces: Sequence[Piece], group: QueryGroup) -> None:
        """Plan a step for every layer. pieces: of `group`."""
        bounds = np.repeat([piece.end for piece in pieces], self.heads.kv)
        room = plan_bytes(len(pieces), self.heads.query, len(pieces))
        options = {"head_dim": self.heads.dim, **self.heads.plan_options(flat=True)}
        self._table, self._begins = self._wrapper.plan_flat(room, [], bounds, **options), group.begins

    def planned(self, group: QueryGroup, scale: float) -> bool:
        """Whether it can attend this group with scores of this scale."""
        return self._begins is group.begins and scale == self.heads.scale

    def attend(
        self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, visible: VisibleChunks
    ) -> torch.Tensor:
        """One layer, as `kernels.triton.chunked_decode` has it; returns what is `[B, Hq, D]` there."""
        if self._table is None:
            raise RuntimeError("kv press: attention without a plan")
        compact_lists(visible, *self._table)
        flat = q.unflatten(1, (self.heads.kv, self.heads.group)).flatten(0, 1).contiguous()
        pools = tuple(pool[:, None, None] for pool in (k_pool, v_pool))
        out: torch.Tensor = self._wrapper.run(flat, pools, out=torch.empty_like(flat))
        return out.view(q.shape)


def _power_of_2(number: int) -> int:
    """The lowest that is no less."""
    return 1 << (number - 1).bit_length()


def indptr_of(lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`[n]` lengths to `[n + 1]` offsets."""
    return np.concatenate([[0], np.cumsum(lengths)])


def plan_bytes(tokens: int, q_heads: int, requests: int) -> int:
    """At most what FlashInfer writes for a plan of this size: up to 7 int32 per tile of at least 16 rows."""
    return 32 * (tokens * q_heads // 16 + requests * q_heads + 1024)


def head_order(lengths: npt.NDArray[Any], tokens: npt.NDArray[Any], heads: int) -> npt.NDArray[np.int64]:
    """From tokens, chunk by chunk, to (chunk, KV head, token of the chunk) and back.

    lengths: of B chunks. tokens: of all chunks, `[N]`. Returns int64 `[3, N * heads]`: of each row of the new order its
    token and its head; and of each (index into tokens, head) its row.
    """
    length, begin = np.repeat(lengths, lengths), np.repeat(indptr_of(lengths)[:-1], lengths)
    place = np.arange(len(tokens)) - begin
    back = (begin * heads + place)[:, None] + length[:, None] * np.arange(heads)
    order = np.empty((3, back.size), np.int64)
    order[0, back], order[1, back] = tokens[:, None], np.arange(heads)
    order[2] = back.ravel()
    return order
