"""Ragged decode attention: C++ at every instruction set of this host, and the torch reference, against fp64."""

from __future__ import annotations

import gc

import pytest
import torch

from kvzap_sglang.kernels import reference
from kvzap_sglang.kernels.cpu import native
from kvzap_sglang.kernels.encoding import VisibleCells

from . import oracle
from .conftest import LEVELS

DTYPES = [torch.float32, torch.bfloat16]
EDGES = [0, 1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1025, 0]


@pytest.fixture(params=[*LEVELS, "reference"])
def decode(request: pytest.FixtureRequest, need_isa):
    """`ragged_decode` at one instruction set, or its reference."""
    if request.param == "reference":
        return reference.ragged_decode
    need_isa(request.param)
    return native.ragged_decode


def random_problem(lengths: list[int], batch: int, group: int, dim: int, dtype: torch.dtype, rng: torch.Generator):
    """q, pools and lists with the given lengths; the rows that no list names are NaN."""
    heads = len(lengths) // batch
    rows = sum(lengths) + 40
    order = torch.randperm(rows, generator=rng)
    lists = [part.sort().values.tolist() for part in order[: sum(lengths)].split(lengths)]
    k, v = (torch.randn(rows, dim, generator=rng).to(dtype) for _ in range(2))
    k[order[sum(lengths) :]], v[order[sum(lengths) :]] = float("nan"), float("nan")
    return torch.randn(batch, heads * group, dim, generator=rng).to(dtype), k, v, lists


def check(decode, q, k, v, lists, scale: float, fp32: float = oracle.TOLERANCE[torch.float32]) -> None:
    """fp32: tolerance of that type."""
    expected, expected_lse = oracle.decode(q, k, v, lists, scale)
    out, lse = decode(q, k, v, oracle.ragged(lists), scale)
    assert out.dtype == q.dtype and out.shape == q.shape and lse.dtype == torch.float32
    tolerance = fp32 if q.dtype == torch.float32 else oracle.TOLERANCE[q.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_groups(decode, group: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    check(decode, *random_problem([0, 1, 600, 33, 64, 2], 2, group, 64, dtype, rng), 0.125)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 96, 112, 128, 192, 256])
def test_head_dimensions(decode, dim: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    check(decode, *random_problem([70, 0, 513, 5], 2, 3, dim, dtype, rng), dim**-0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_at_every_edge(decode, dtype: torch.dtype, rng: torch.Generator) -> None:
    check(decode, *random_problem(EDGES, 1, 2, 32, dtype, rng), 0.2)


def test_heads_of_very_different_lengths(decode, rng: torch.Generator) -> None:
    check(decode, *random_problem([6000, 1, 0, 40, 2, 300], 2, 3, 64, torch.float32, rng), 0.125)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_neither_overflow_nor_lose_the_peak(decode, dtype: torch.dtype, rng: torch.Generator) -> None:
    q, k, v, lists = random_problem([700, 33], 1, 3, 64, dtype, rng)
    ramp = torch.linspace(1, 40, k.shape[0])[:, None]
    # Scores of some hundreds carry a rounding error of 1e-5 to 1e-4 in fp32, and so do their exponentials.
    check(decode, q, (k.float() * ramp).to(dtype), v, lists, 1.0, fp32=5e-4)


def test_pools_with_foreign_row_strides_and_query_views(decode, rng: torch.Generator) -> None:
    q, k, v, lists = random_problem([90, 7, 0, 130], 2, 3, 64, torch.float32, rng)
    both = torch.stack((k, v), dim=1)
    qkv = torch.cat((q, q * 2), dim=1)
    check(decode, qkv[:, : q.shape[1]], both[:, 0], both[:, 1], lists, 0.125)


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_segments_give_zero_and_minus_infinity(decode, dtype: torch.dtype, rng: torch.Generator) -> None:
    q, k, v, lists = random_problem([0, 0, 0, 3], 2, 3, 64, dtype, rng)
    poison = [torch.full_like(q, float("nan")) for _ in range(8)] + [torch.full((2, 6), float("nan"))] * 8
    del poison
    gc.collect()  # what the kernel allocates next is likely this memory
    out, lse = decode(q, k, v, oracle.ragged(lists), 0.125)
    assert (out[0] == 0).all() and torch.isneginf(lse[0]).all()
    assert (out[1, :3] == 0).all() and torch.isneginf(lse[1, :3]).all()
    assert torch.isfinite(out).all() and torch.isfinite(lse[1, 3:]).all()


def test_no_request(decode) -> None:
    empty = VisibleCells(torch.tensor([0]), torch.empty(0, dtype=torch.int32))
    out, lse = decode(torch.empty(0, 6, 64), torch.zeros(5, 64), torch.zeros(5, 64), empty, 0.125)
    assert out.shape == (0, 6, 64) and lse.shape == (0, 6)


def test_a_nan_in_a_visible_row_is_not_hidden(decode, rng: torch.Generator) -> None:
    q, k, v, lists = random_problem([100, 100], 1, 3, 64, torch.float32, rng)
    k[lists[0][37], 5] = float("nan")
    out, _ = decode(q, k, v, oracle.ragged(lists), 0.125)
    assert out[0, :3].isnan().all() and torch.isfinite(out[0, 3:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_thread_counts_give_the_same_bits(decode, dtype: torch.dtype, rng: torch.Generator, set_threads) -> None:
    q, k, v, lists = random_problem([1500, 0, 513, 7, 900, 64], 2, 3, 64, dtype, rng)
    results = []
    for threads in (1, 2):
        set_threads(threads)
        results.append(decode(q, k, v, oracle.ragged(lists), 0.125))
    if decode is reference.ragged_decode:  # torch's own matrix product may split the sum by threads
        torch.testing.assert_close(results[0], results[1])
    else:
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("cell", [-1, -7, 50, (1 << 31) - 1])
def test_cell_outside_the_pool_is_named(decode, cell: int) -> None:
    if decode is reference.ragged_decode and cell < 0:
        pytest.skip("torch reads a negative index from the end")
    cells = [0] * 1300
    cells[700] = cell
    with pytest.raises(IndexError, match=str(cell)):
        decode(torch.zeros(1, 3, 16), torch.zeros(50, 16), torch.zeros(50, 16), oracle.ragged([cells]), 1.0)


def test_row_addresses_beyond_two_gibibytes() -> None:
    rows = (1 << 31) // 256 + 64  # elements past 2^31 with D = 256 in bf16; only the touched pages take memory
    pool = torch.empty(rows, 256, dtype=torch.bfloat16)
    pool[-3:] = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)[:, None]
    q = torch.zeros(1, 1, 256, dtype=torch.bfloat16)
    out, lse = native.ragged_decode(q, pool, pool, oracle.ragged([[rows - 3, rows - 2, rows - 1]]), 1.0)
    assert (out == 2).all() and lse.item() == pytest.approx(torch.tensor(3.0).log().item())


def test_wrong_arguments_are_refused() -> None:
    q, pool, visible = torch.zeros(1, 3, 64), torch.zeros(9, 64), oracle.ragged([[1], [2], [3]])
    with pytest.raises(TypeError, match=r"q is torch\.bfloat16"):
        native.ragged_decode(q.bfloat16(), pool, pool, visible, 1.0)
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        native.ragged_decode(q.half(), pool.half(), pool.half(), visible, 1.0)
    with pytest.raises(ValueError, match="head dimension 24"):
        native.ragged_decode(q[..., :24], pool[:, :24], pool[:, :24], visible, 1.0)
    with pytest.raises(ValueError, match="head dimension 64"):
        native.ragged_decode(q, pool[:, :32], pool[:, :32], visible, 1.0)
    with pytest.raises(ValueError, match="3 segments do not fit 2 requests"):
        native.ragged_decode(torch.zeros(2, 3, 64), pool, pool, visible, 1.0)
    with pytest.raises(ValueError, match="indptr ends at 3 of 2"):
        native.ragged_decode(q, pool, pool, VisibleCells(visible.indptr, visible.cells[:2]), 1.0)
    with pytest.raises(ValueError, match=r"visible\.cells must be"):
        native.ragged_decode(q, pool, pool, VisibleCells(visible.indptr, visible.cells.long()), 1.0)
    with pytest.raises(ValueError, match="pools differ"):
        native.ragged_decode(q, pool, pool[:5], visible, 1.0)


def test_read_rows_reads_every_row_once(rng: torch.Generator) -> None:
    lists = [[3, 5], [], [0, 7, 8]]
    for dtype in DTYPES:
        k, v = (torch.randint(-8, 8, (9, 64), generator=rng).to(dtype) for _ in range(2))
        rows = torch.tensor([c for part in lists for c in part])
        expected = (k[rows].double().sum() + v[rows].double().sum()).item()
        assert native.read_rows(k, v, oracle.ragged(lists)) == expected
