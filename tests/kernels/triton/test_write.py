"""Writing new cells and condemning: Triton against the torch reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kvzap_sglang.kernels import triton as kernels
from kvzap_sglang.kernels.counters import COUNTERS, HOMELESS
from kvzap_sglang.kernels.encoding import NONE
from kvzap_sglang.kernels.triton import reference
from kvzap_sglang.kernels.triton.write import TOKENS

from .problems import DEVICE

LAYERS = 3


def run(write, state: list[torch.Tensor]) -> list[torch.Tensor]:
    """`write` on copies; returns what it may have changed: table, pools, kept, counters."""
    table, slots, k, v, k_pool, v_pool, scores, limits, kept, counters = (tensor.clone() for tensor in state)
    write(table, slots, k, v, k_pool, v_pool, scores, limits, kept[:, 1], counters)
    return [table, k_pool, v_pool, kept, counters]


def problem(tokens: int, heads: int, dim: int, pool_dtype: torch.dtype, rng: torch.Generator) -> list[torch.Tensor]:
    table = torch.full((tokens + 9, heads), NONE, dtype=torch.int32)
    slots = 1 + torch.randperm(tokens + 5, generator=rng)[:tokens]
    table[slots] = (
        torch.randperm(tokens * heads + 4, generator=rng)[: tokens * heads].view(tokens, heads).to(torch.int32)
    )
    fused = torch.randn(tokens, 2 * heads * dim + 3, generator=rng)  # rows of a fused projection lie apart
    k, v = (fused[:, at : at + heads * dim].view(tokens, heads, dim) for at in (0, heads * dim))
    pools = [torch.full((tokens * heads + 4, dim), torch.nan, dtype=pool_dtype) for _ in range(2)]
    # Of a wider buffer, as one layer's scores of all layers' are.
    scores = torch.randn(tokens, heads + 2, generator=rng)[:, :heads]
    limits = torch.randn(tokens, generator=rng)
    limits[::5] = -torch.inf
    scores[:1, :1] = limits[:1, None]  # equal to the limit: kept
    kept = torch.full((tokens, LAYERS, heads), 7, dtype=torch.int8)
    counters = torch.zeros(COUNTERS, dtype=torch.int64)
    return [tensor.to(DEVICE) for tensor in (table, slots, k, v, *pools, scores, limits, kept, counters)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, TOKENS - 1, TOKENS, TOKENS + 1, 100])
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (3, 64), (8, 96), (2, 256)])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16])
def test_rows_marks_and_bits(tokens: int, heads: int, dim: int, pool_dtype: torch.dtype, rng: torch.Generator) -> None:
    state = problem(tokens, heads, dim, pool_dtype, rng)
    found = run(kernels.write_cells, state)
    assert_same(found, run(reference.write_cells, state))
    assert (found[3][:, [0, 2]] == 7).all() and not found[4].any()


def test_padding_writes_nothing_and_is_no_fault(rng: torch.Generator) -> None:
    state = problem(20, 2, 64, torch.float32, rng)
    state[1][17:] = 0
    found = run(kernels.write_cells, state)
    assert_same(found, run(reference.write_cells, state))
    assert not found[4].any() and (found[0][0] == NONE).all()


def test_a_token_without_a_cell_is_a_fault(rng: torch.Generator) -> None:
    """Of one head only: the other heads' rows are written, the fault is flagged, nothing else is touched."""
    state = problem(20, 2, 64, torch.float32, rng)
    state[0][state[1][7], 1] = NONE
    found = run(kernels.write_cells, state)
    assert_same(found, run(reference.write_cells, state))
    assert found[4].tolist() == [0, 0, HOMELESS, 0] and found[0][state[1][7], 1] == NONE
