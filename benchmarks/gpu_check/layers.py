"""Inputs of timed decode attention: as many layers' data in rotation as no cache holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu_check.environment import l2_bytes
from benchmarks.gpu_check.kernels import Kernels
from benchmarks.gpu_check.shapes import KEPT, DecodeShape
from benchmarks.gpu_check.spread import kept_fractions
from benchmarks.gpu_check.step import WINDOW
from kvzap_sglang.kernels.encoding import CONDEMNED, NONE
from kvzap_sglang.kernels.triton import VisibleChunks, first_chunks

LAYOUTS = ("holes", "scattered")
"""holes: a head's cells are an ascending part of the run that its dense prompt got (what pruning leaves).
scattered: token slots and cells lie anywhere (after hours of serving)."""
COLD = 4
"""Caches that the least data of a rotation fills."""


@dataclass
class Data:
    """Dense K and V of n layers `[n, rows, D]`, rows as `[B, H, context]`; q of each `[n, B, Hq, D]`."""

    shape: DecodeShape
    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor

    @property
    def layers(self) -> int:
        return len(self.k)

    @property
    def device(self) -> torch.device:
        return self.k.device


def layers_needed(shape: DecodeShape, device: str) -> int:
    """In rotation."""
    if device != "cuda":
        return 2
    return max(2, -(-COLD * l2_bytes() // round(shape.kv_bytes * min(KEPT))))


def bytes_needed(shape: DecodeShape, layers: int) -> int:
    """On the device: K and V, tables, lists of all layers, and what building them takes."""
    return layers * (shape.kv_bytes + 16 * shape.kv_rows) + 64 * shape.kv_rows


def build(shape: DecodeShape, layers: int, dtype: torch.dtype, device: str, seed: int) -> Data:
    rng = torch.Generator(device).manual_seed(seed)
    layer = shape.layer

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(generator=rng)

    return Data(
        shape,
        normal(layers, shape.kv_rows, layer.dim),
        normal(layers, shape.kv_rows, layer.dim),
        normal(layers, shape.batch, layer.q_heads, layer.dim),
        torch.full((shape.batch,), shape.context, device=device),
        torch.arange(shape.batch, device=device),
    )


class Pruned:
    """Cell tables of a rotation: what is kept, and where it lies."""

    def __init__(self, data: Data, kept: float, layout: str, seed: int) -> None:
        shape, device = data.shape, data.device
        self._data = data
        rng = torch.Generator(device).manual_seed(seed)
        tokens, heads = shape.batch * shape.context, shape.layer.kv_heads
        fractions = torch.as_tensor(kept_fractions(kept, data.layers, heads, seed), dtype=torch.float32, device=device)
        scattered = layout == "scattered"
        slots = (
            torch.randperm(tokens, generator=rng, device=device) if scattered else torch.arange(tokens, device=device)
        )
        self.req_to_token = (1 + slots).view(shape.batch, shape.context).to(torch.int32)
        self.tables = torch.full((data.layers, tokens + 1, heads), NONE, dtype=torch.int32, device=device)
        self.dense_from = data.lengths - 1 - WINDOW
        in_window = torch.arange(shape.context, device=device) >= shape.context - 1 - WINDOW
        for layer in range(data.layers):
            rows = torch.arange(shape.kv_rows, dtype=torch.int32, device=device)
            if scattered:
                rows = torch.randperm(shape.kv_rows, generator=rng, device=device).to(torch.int32)
            cells = rows.view(shape.batch, heads, shape.context).transpose(1, 2)
            is_kept = torch.rand(cells.shape, generator=rng, device=device) < fractions[layer]
            condemned = torch.where(in_window[:, None], cells | CONDEMNED, NONE)
            entries = torch.where(is_kept, cells, condemned)
            self.tables[layer, self.req_to_token.flatten().long()] = entries.reshape(tokens, heads)


class Lists:
    """Lists and scratch for one chunk size; every layer of the rotation has lists of its own."""

    def __init__(self, data: Data, pruned: Pruned, chunk: int) -> None:
        shape, device = data.shape, data.device
        self._data, self._pruned = data, pruned
        chunks, heads = shape.batch * -(-shape.context // chunk), shape.layer.kv_heads
        first = first_chunks(
            data.lengths, chunk, torch.empty(shape.batch + 1, dtype=torch.int32, device=device)
        )  # the same in all layers
        cells = torch.zeros(data.layers, chunks, heads, chunk, dtype=torch.int32, device=device)
        counts = torch.zeros(data.layers, chunks, heads, dtype=torch.int32, device=device)
        self.visible = [VisibleChunks(first, c, n) for c, n in zip(cells, counts, strict=True)]
        self.counts = counts
        self._part = torch.empty(chunks, shape.layer.q_heads, shape.layer.dim, device=device)
        self._part_lse = torch.empty(chunks, shape.layer.q_heads, device=device)
        self.out = torch.empty_like(data.q)
        self.lse = torch.empty(data.q.shape[:3], device=device)

    def listing(self, kernels: Kernels) -> list[Callable[[], None]]:
        """A call per layer that fills its lists."""
        d, p = self._data, self._pruned

        def call(i: int) -> Callable[[], None]:
            return lambda: kernels.visible_chunks(
                p.tables[i], p.req_to_token, d.rows, d.lengths, p.dense_from, self.visible[i]
            )

        return [call(i) for i in range(d.layers)]

    def attending(self, kernels: Kernels) -> list[Callable[[], None]]:
        """A call per layer that attends over them."""
        d = self._data
        scale = d.shape.layer.dim**-0.5

        def call(i: int) -> Callable[[], None]:
            return lambda: kernels.chunked_decode(
                d.q[i], d.k[i], d.v[i], self.visible[i], scale, self._part, self._part_lse, self.out[i], self.lse[i]
            )

        return [call(i) for i in range(d.layers)]

    def compacting(self, kernels: Kernels) -> list[Callable[[], None]]:
        """A call per layer that puts its lists behind one another; all into the same buffers."""
        segments = self.counts.shape[2] * self._data.shape.batch
        indptr = torch.empty(segments + 1, dtype=torch.int32, device=self._data.device)
        indices = torch.empty(self._data.shape.kv_rows, dtype=torch.int32, device=self._data.device)

        def call(i: int) -> Callable[[], None]:
            return lambda: kernels.compact_lists(self.visible[i], indptr, indices)

        return [call(i) for i in range(self._data.layers)]

    @property
    def visible_pairs(self) -> float:
        """(position, head) pairs of a layer's lists, mean; after `listing` ran."""
        return float(self.counts.sum()) / len(self.counts)
