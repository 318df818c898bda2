"""The addressing of FlashInfer's FA2 kernel over page tables, in torch: where each CTA reads and writes.

After `BatchPrefillWithPagedKVCacheDevice` (attention/prefill.cuh) and `PersistentVariableLengthMergeStatesKernel`
(attention/cascade.cuh) of 0.7.2, for one KV head, pages of one token, no mask and no window. Lengths are those of the
page table at hand, as in the kernel; everything else is the plan's. What no CTA writes stays NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .flashinfer_planner import Schedule


class Tables(NamedTuple):
    """Lists of cells of R requests, and the pool. indptr: `[R + 1]`. indices: int64 `[cells]`. k, v: `[N, D]`."""

    indptr: list[int]
    indices: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def length(self, request: int) -> int:
        return self.indptr[request + 1] - self.indptr[request]

    def attended(self, q: torch.Tensor, request: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """q `[n, D]` over positions `[start, end)` of a list: output, and LSE to base 2; 0 and -inf of nothing."""
        cells = self.indices[self.indptr[request] + start : self.indptr[request] + end]
        scores = q @ self.k[cells].T * q.shape[1] ** -0.5
        return scores.softmax(dim=1) @ self.v[cells], scores.logsumexp(dim=1) / math.log(2)


def run(
    schedule: Schedule, q: torch.Tensor, q_lengths: torch.Tensor, tables: Tables
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[tokens, G, D]` and LSE `[tokens, G]` (base 2) of q `[tokens, G, D]`. Asserts that no CTA writes where
    another does, or outside what was reserved."""
    tile, group = schedule.tile, q.shape[1]
    begins = [0, *q_lengths.cumsum(0).tolist()]
    split = schedule.merge_indptr is not None
    rows = -(-len(schedule.request) * tile // group) if split else len(q)
    out, lse = torch.full((rows, *q.shape[1:]), torch.nan), torch.full((rows, group), torch.nan)
    written = torch.zeros(rows, group, dtype=torch.int64)
    for request, q_tile, kv_tile in schedule.works():
        queries, keys = begins[request + 1] - begins[request], tables.length(request)
        window = keys
        first = max(0, keys + q_tile * tile // group - (queries + window))
        start, end, parts = first, keys, 1
        if split:
            start, end = (
                min(kv_tile * schedule.chunk + first, keys),
                min((kv_tile + 1) * schedule.chunk + first, keys),
            )
            parts = -(-min(max(keys, 1), window + tile) // schedule.chunk)
        packed = torch.arange(q_tile * tile, (q_tile + 1) * tile)
        token, head = packed // group, packed % group
        token, head = token[packed // group < queries], head[packed // group < queries]
        row = int(schedule.o_indptr[request]) + (token * parts + kv_tile if split else token)
        out[row, head], lse[row, head] = tables.attended(q[begins[request] + token, head], request, start, end)
        written[row, head] += 1
    assert int(written.max()) == 1
    return _merged(out, lse, schedule.merge_indptr.tolist()) if schedule.merge_indptr is not None else (out, lse)


def _merged(out: torch.Tensor, lse: torch.Tensor, merge_indptr: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's parts by their LSE."""
    tokens = len(merge_indptr) - 1
    merged, merged_lse = torch.zeros(tokens, *out.shape[1:]), torch.full((tokens, out.shape[1]), -torch.inf)
    for token in range(tokens):
        parts = slice(merge_indptr[token], merge_indptr[token + 1])
        highest = lse[parts].amax(dim=0)
        weight = torch.exp2(lse[parts] - highest.masked_fill(highest.isinf(), 0.0))
        mass = weight.sum(dim=0)
        merged[token] = (weight[..., None] * out[parts]).sum(dim=0) / mass.masked_fill(mass == 0, 1.0)[:, None]
        merged_lse[token] = mass.log2() + highest
    return merged, merged_lse
