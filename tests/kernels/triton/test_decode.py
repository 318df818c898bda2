"""Decode attention over chunked lists: Triton and the torch reference against fp64, outputs and scratch poisoned."""

from __future__ import annotations

import pytest
import torch

from kvzap_sglang.kernels import triton as kernels
from kvzap_sglang.kernels.triton import reference
from kvzap_sglang.kernels.triton.decode import KEYS

from .problems import DEVICE, Requests, empty_lists, random_requests

CHUNK = 128
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# Triton's interpreter computes bf16 as integers: that type is tested on a GPU.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
EDGES = [0, 1, KEYS - 1, KEYS, KEYS + 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]


def check(attend, requests: Requests, group: int, dim: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    """One decode step. Rows of the pool that no list names are NaN."""
    window, heads, batch = 8, requests.table.shape[1], len(requests.rows)
    visible = empty_lists(requests, CHUNK)
    kernels.visible_chunks(
        requests.table,
        requests.req_to_token,
        requests.rows,
        requests.lengths,
        requests.dense_from(window),
        visible,
    )
    listed = {
        cell
        for c in range(int(visible.first[-1]))
        for h in range(heads)
        for cell in visible.cells[c, h, : int(visible.counts[c, h])].tolist()
    }
    unused = torch.tensor([cell not in listed for cell in range(requests.cells)], device=DEVICE)
    k, v = (torch.randn(requests.cells, dim, generator=rng).to(DEVICE, dtype) for _ in range(2))
    k[unused], v[unused] = torch.nan, torch.nan
    q = torch.randn(batch, heads * group, dim, generator=rng).to(DEVICE, dtype)
    chunks = len(visible.counts)
    part = torch.full((chunks, heads * group, dim), torch.nan, device=DEVICE)
    part_lse = torch.full((chunks, heads * group), torch.nan, device=DEVICE)
    out, lse = torch.full_like(q, torch.nan), torch.full((batch, heads * group), torch.nan, device=DEVICE)
    attend(q, k, v, visible, dim**-0.5, part, part_lse, out, lse)
    exact, exact_lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(lse.shape, -torch.inf, dtype=torch.float64)
    first = visible.first.tolist()
    for b in range(batch):
        for h in range(heads):
            lists = [visible.cells[c, h, : int(visible.counts[c, h])] for c in range(first[b], first[b + 1])]
            cells = torch.cat(lists).long() if lists else []
            if not len(cells):
                continue
            where = slice(h * group, (h + 1) * group)
            scores = q[b, where].double() @ k[cells].double().T * dim**-0.5
            exact[b, where] = scores.softmax(dim=1) @ v[cells].double()
            exact_lse[b, where] = scores.logsumexp(dim=1)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double().cpu(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double().cpu(), exact_lse, rtol=1e-5, atol=tolerance)


BOTH = pytest.mark.parametrize(
    "attend", [kernels.chunked_decode, reference.chunked_decode], ids=["triton", "reference"]
)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_and_heads_that_keep_very_different_parts(attend, dtype: torch.dtype, rng: torch.Generator) -> None:
    check(attend, random_requests(EDGES, [0.0, 1.0, 0.3], rng, shared=40), 3, 64, dtype, rng)


@BOTH
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8, 16])
def test_groups(attend, group: int, rng: torch.Generator) -> None:
    check(attend, random_requests([0, 1, 70, 200], [0.6, 0.2], rng), group, 64, torch.float32, rng)


@BOTH
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(attend, dim: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    check(attend, random_requests([3, 150], [0.6, 0.2], rng), 4, dim, dtype, rng)


@pytest.mark.parametrize("programs", [1, 5])
def test_few_programs_take_all_chunks(programs: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvzap_sglang.kernels.triton.decode.PROGRAMS", programs)
    check(kernels.chunked_decode, random_requests(EDGES, [0.5, 0.1], rng), 2, 64, torch.float32, rng)


def test_extreme_scores(rng: torch.Generator) -> None:
    """Scores far apart neither overflow nor lose the largest one, wherever its chunk is."""
    requests = random_requests([3 * CHUNK], [1.0], rng)
    visible = empty_lists(requests, CHUNK)
    kernels.visible_chunks(
        requests.table,
        requests.req_to_token,
        requests.rows,
        requests.lengths,
        requests.dense_from(0),
        visible,
    )
    best = int(visible.cells[1, 0, 5])
    k, v = torch.zeros(requests.cells, 64, device=DEVICE), torch.randn(requests.cells, 64).to(DEVICE)
    k[best], q = 300.0, torch.ones(1, 1, 64, device=DEVICE)
    part, part_lse = torch.full((5, 1, 64), torch.nan, device=DEVICE), torch.full((5, 1), torch.nan, device=DEVICE)
    out, lse = torch.empty_like(q), torch.empty(1, 1, device=DEVICE)
    kernels.chunked_decode(q, k, v, visible, 1.0, part, part_lse, out, lse)
    torch.testing.assert_close(out[0, 0], v[best])
    torch.testing.assert_close(lse, torch.full_like(lse, 300.0 * 64))
