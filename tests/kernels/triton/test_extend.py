"""Attention of a chunk after its prefix: Triton and the torch reference against DESIGN's rule in fp64."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from kvzap_sglang.kernels import triton as kernels
from kvzap_sglang.kernels.encoding import CELL_MASK, CONDEMNED
from kvzap_sglang.kernels.triton import reference

from .problems import DEVICE, empty_lists, random_requests
from .test_decode import DTYPES, TOLERANCE

CHUNK, WINDOW = 64, 8
BOTH = pytest.mark.parametrize("attend", [kernels.extend, reference.extend], ids=["triton", "reference"])
MODES = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])


def check(
    attend,
    prefixes: list[int],
    lengths: list[int],
    kept_part: list[float],
    group: int,
    dim: int,
    dtype: torch.dtype,
    sparse: bool,
    rng: torch.Generator,
) -> None:
    """One batch of chunks. Pool rows that no entry names are NaN, and the output is poisoned."""
    requests, heads = random_requests(prefixes, kept_part, rng, shared=10), len(kept_part)
    lists = empty_lists(requests, CHUNK, detail=sparse)
    # Dense: the window as it stood at the hit. Sparse: all that the first token of the chunk can see.
    dense_from = requests.lengths - WINDOW
    kernels.visible_chunks(requests.table, requests.req_to_token, requests.rows, requests.lengths, dense_from, lists)
    tokens = sum(lengths) + len(lengths)
    fused = torch.randn(tokens, (group + 2) * heads * dim, generator=rng).to(DEVICE, dtype)
    parts = fused.split([group * heads * dim, heads * dim, heads * dim], dim=1)
    q, k, v = (part.view(tokens, -1, dim) for part in parts)
    k_pool, v_pool = (torch.randn(requests.cells, dim, generator=rng).to(DEVICE, dtype) for _ in range(2))
    kept = torch.rand(tokens, heads, generator=rng).to(DEVICE) < 0.5
    # Chunks lie in another order than their requests, with tokens of nobody between them.
    order = torch.randperm(len(lengths), generator=rng).tolist()
    places, begins = accumulate((lengths[b] + 1 for b in order), initial=0), [0] * len(lengths)
    for b, place in zip(order, places, strict=False):
        begins[b] = place
    bounds = [torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in (begins, lengths)]
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    attend(
        q, k, v, k_pool, v_pool, lists, requests.lengths, *bounds, dim**-0.5, WINDOW, kept if sparse else None, out,
        max(lengths),
    )  # fmt: skip
    exact = torch.full(q.shape, torch.nan, dtype=torch.float64)
    for b, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        start, end = prefixes[b], begin + length
        slots = requests.req_to_token[requests.rows[b], :start].long()
        for t in range(begin, end):
            position = start + t - begin
            for h in range(heads):
                entry, ages = requests.table[slots, h], position - torch.arange(start)
                near = ages <= WINDOW if sparse else torch.arange(start) >= start - WINDOW
                seen = (entry >= 0) & ((entry < CONDEMNED) | near.to(DEVICE))
                cells = (entry[seen] & CELL_MASK).long()
                own = torch.arange(begin, t + 1)
                if sparse:
                    own = own[kept[own, h].cpu() | (t - own <= WINDOW)]
                keys, values = torch.cat([k_pool[cells], k[own, h]]), torch.cat([v_pool[cells], v[own, h]])
                heads_of = slice(h * group, (h + 1) * group)
                scores = q[t, heads_of].double() @ keys.double().T * dim**-0.5
                exact[t, heads_of] = scores.softmax(dim=1) @ values.double()
    torch.testing.assert_close(out.double().cpu(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


@BOTH
@MODES
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths(attend, sparse: bool, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Prefixes and chunks around nothing and the block sizes, heads that keep all and nothing."""
    prefixes = [0, 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 0, 70]
    check(attend, prefixes, [1, 64, 3, 43, 17, 30, 1], [0.0, 1.0, 0.4], 3, 64, dtype, sparse, rng)


@BOTH
@MODES
@pytest.mark.parametrize("group", [1, 2, 5, 16])
def test_groups(attend, sparse: bool, group: int, rng: torch.Generator) -> None:
    check(attend, [0, 90], [20, 33], [0.6, 0.1], group, 64, torch.float32, sparse, rng)


@BOTH
@MODES
@pytest.mark.parametrize("dim", [96, 128, 256])
def test_head_dims(attend, sparse: bool, dim: int, rng: torch.Generator) -> None:
    check(attend, [70, 5], [9, 40], [0.5], 2, dim, torch.float32, sparse, rng)


def test_a_chunk_longer_than_a_tile(rng: torch.Generator) -> None:
    check(kernels.extend, [30], [150], [0.5], 2, 64, torch.float32, True, rng)


def test_a_sparse_extend_needs_positions(rng: torch.Generator) -> None:
    with pytest.raises(ValueError, match="positions"):
        requests = random_requests([5], [0.5], rng)
        lists, x = empty_lists(requests, CHUNK), torch.zeros(2, 1, 64, device=DEVICE)
        number = torch.tensor([2], device=DEVICE)
        kernels.extend(x, x, x, x[0], x[0], lists, number, 0 * number, number, 1.0, 8, x[:, :, 0] > 0, x, 2)
