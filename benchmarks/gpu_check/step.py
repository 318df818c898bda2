"""A whole decode step of our own kernels, all layers, over a pool in the state that a server's is in."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu_check.kernels import Kernels
from benchmarks.gpu_check.shapes import Model
from kvzap_sglang.kernels.counters import COUNTERS, FREE, report_bytes
from kvzap_sglang.kernels.encoding import CONDEMNED, NONE
from kvzap_sglang.kernels.triton import VisibleChunks

WINDOW = 128


@dataclass
class DecodeStep:
    """State and inputs of one step of B requests; what `run` writes is poisoned before.

    table: int32 `[L, S, H]`. req_to_token: int32 `[B, context]`. lengths: int64 `[B]`, new token included.
    slots, leaving: int64 `[B]`, token slots of the new token and of the one whose age is the window (0: none).
    stack, counters: the free cells. k_pool, v_pool: `[N, D]`, NaN in free cells.
    q: `[L, B, Hq, D]`; k, v: `[L, B, H, D]`; scores: `[B, L, H]`, of the new tokens; limits: fp32 `[B]`.
    """

    table: torch.Tensor
    req_to_token: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    leaving: torch.Tensor
    stack: torch.Tensor
    counters: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor
    limits: torch.Tensor
    lists: VisibleChunks
    rows: torch.Tensor = field(init=False)
    dense_from: torch.Tensor = field(init=False)
    kept: torch.Tensor = field(init=False)
    report: torch.Tensor = field(init=False)
    part: torch.Tensor = field(init=False)
    part_lse: torch.Tensor = field(init=False)
    out: torch.Tensor = field(init=False)
    lse: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        layers, batch, q_heads, dim = self.q.shape
        device, chunks, heads = self.q.device, len(self.lists.counts), self.table.shape[2]
        self.rows = torch.arange(batch, device=device)
        self.dense_from = torch.empty_like(self.lengths)
        self.kept = torch.full((batch, layers, heads), 7, dtype=torch.int8, device=device)
        self.report = torch.full((report_bytes(batch, layers * heads),), 0xA5, dtype=torch.uint8, device=device)
        self.part = torch.full((chunks, q_heads, dim), torch.nan, device=device)
        self.part_lse = torch.full((chunks, q_heads), torch.nan, device=device)
        self.out = torch.full_like(self.q, torch.nan)
        self.lse = torch.full((layers, batch, q_heads), torch.nan, device=device)

    def run(self, kernels: Kernels) -> None:
        """The step: cells for the new tokens, each layer, settling what left the window, the report."""
        self.prepare(kernels)
        kernels.take_cells(self.table, self.slots, self.stack, self.counters)
        for layer in range(len(self.q)):
            kernels.write_cells(
                self.table[layer], self.slots, self.k[layer], self.v[layer], self.k_pool, self.v_pool,
                self.scores[:, layer], self.limits, self.kept[:, layer], self.counters,
            )  # fmt: skip
            self.list_visible(kernels, layer)
            self.attend(kernels, layer)
        kernels.free_cells(self.table, self.leaving, self.stack, self.counters, settle=True)
        kernels.step_report(self.kept.view(len(self.kept), -1), self.counters, self.report)

    def prepare(self, kernels: Kernels) -> None:
        """What all layers share: where each request's chunks begin, and its window."""
        kernels.place_chunks(self.lengths, self.lists.cells.shape[2], WINDOW, self.lists.first, self.dense_from)

    def list_visible(self, kernels: Kernels, layer: int) -> None:
        table = self.table[layer]
        kernels.visible_chunks(table, self.req_to_token, self.rows, self.lengths, self.dense_from, self.lists)

    def attend(self, kernels: Kernels, layer: int) -> None:
        kernels.chunked_decode(
            self.q[layer], self.k_pool, self.v_pool, self.lists, self.q.shape[3] ** -0.5, self.part, self.part_lse,
            self.out[layer], self.lse[layer],
        )  # fmt: skip

    def go_to(self, lengths: torch.Tensor) -> None:
        """Make it the step of other lengths, in place: as a graph's inputs are changed between two replays."""
        self.lengths.copy_(lengths)
        self.slots.copy_(self._slot_at(lengths - 1))
        self.leaving.copy_(self._slot_at(lengths - 1 - WINDOW))

    def _slot_at(self, position: torch.Tensor) -> torch.Tensor:
        slot = self.req_to_token.gather(1, position.clamp(min=0)[:, None])[:, 0].long()
        return torch.where(position >= 0, slot, 0)

    def results(self) -> dict[str, torch.Tensor]:
        """Copies of what a step changes; the free cells sorted: their order is nobody's business."""
        free = self.stack[: int(self.counters[FREE])].sort().values
        named = {name: getattr(self, name) for name in ("table", "kept", "report", "counters", "out", "lse")}
        return {name: tensor.clone() for name, tensor in named.items()} | {"free cells": free}


class Snapshot:
    """The state that a step changes; `restore` puts it back, and poisons the outputs."""

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        self._saved = [(tensor, tensor.clone()) for tensor in (step.table, step.stack, step.counters)]

    def restore(self) -> None:
        for tensor, saved in self._saved:
            tensor.copy_(saved)
        for tensor in (self._step.out, self._step.lse):
            tensor.fill_(torch.nan)


def step_bytes(model: Model, tokens: int, kept: float) -> int:
    """Memory that `build_step` needs at most, about."""
    pairs = tokens * model.layers * model.kv_heads
    table, scratch = 4 * pairs, 24 * pairs  # random numbers, masks, a sorted permutation
    return round(pairs * min(1.0, kept + 0.03) * (4 * model.dim + 24)) + 2 * table + scratch


def build_step(
    model: Model, lengths: list[int], kept: NDArray[np.float64], dtype: torch.dtype, chunk: int, device: str, seed: int
) -> DecodeStep:
    """A random one. lengths: positions with the new token. kept: `[L, H]`, of what has left the window.

    Cells and token slots lie anywhere, as after hours of serving.
    """
    rng = torch.Generator(device).manual_seed(seed)
    layers, heads, dim, batch = model.layers, model.kv_heads, model.dim, len(lengths)
    length = torch.tensor(lengths, device=device)
    slots, spare = 1 + sum(lengths), 4 * batch * layers * heads
    req_to_token = torch.zeros(batch, max(lengths), dtype=torch.int32, device=device)
    there = torch.arange(max(lengths), device=device)[None, :] < length[:, None]
    req_to_token[there] = 1 + torch.randperm(slots - 1, generator=rng, device=device).to(torch.int32)
    age = torch.full((slots,), -1, dtype=torch.int64, device=device)
    age[req_to_token[there].long()] = (length[:, None] - 1 - torch.arange(max(lengths), device=device))[there]
    table = _random_table(age, torch.as_tensor(kept.astype(np.float32), device=device), rng)
    owned = table >= 0
    cells = torch.randperm(int(owned.sum()) + spare, generator=rng, device=device).to(torch.int32)
    table[owned] += cells[spare:]
    stack = torch.full_like(cells, NONE)
    stack[:spare] = cells[:spare]
    counters = torch.zeros(COUNTERS, dtype=torch.int64, device=device)
    counters[FREE] = spare

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=rng)

    pools = [normal(len(cells), dim) for _ in range(2)]
    for pool in pools:
        pool[cells[:spare].long()] = torch.nan
    step = DecodeStep(
        table=table, req_to_token=req_to_token, lengths=length, slots=torch.zeros_like(length),
        leaving=torch.zeros_like(length), stack=stack, counters=counters, k_pool=pools[0], v_pool=pools[1],
        q=normal(layers, batch, model.q_heads, dim), k=normal(layers, batch, heads, dim),
        v=normal(layers, batch, heads, dim), scores=normal(batch, layers, heads),
        limits=torch.full((batch,), 0.5, device=device), lists=_empty_lists(batch, lengths, heads, chunk, device),
    )  # fmt: skip
    step.go_to(length)
    return step


def _random_table(age: torch.Tensor, kept: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Entries of cell 0, condemned or not, or NONE: int32 `[L, S, H]`. age: int64 `[S]` of each slot, -1: nobody's."""
    layers, heads = kept.shape
    table = torch.empty(layers, len(age), heads, dtype=torch.int32, device=age.device)
    outside, none = (age > WINDOW)[:, None], (age <= 0)[:, None]
    for layer in range(layers):
        is_kept = torch.rand(len(age), heads, generator=rng, device=age.device) < kept[layer]
        condemned = torch.where(outside, NONE, CONDEMNED)
        table[layer] = torch.where(none, NONE, torch.where(is_kept, 0, condemned))
    return table


def _empty_lists(batch: int, lengths: list[int], heads: int, chunk: int, device: str) -> VisibleChunks:
    chunks = sum(-(-length // chunk) for length in lengths)
    first = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    cells = torch.full((chunks, heads, chunk), 1 << 29, dtype=torch.int32, device=device)
    return VisibleChunks(first, cells, torch.full((chunks, heads), 1 << 29, dtype=torch.int32, device=device))
