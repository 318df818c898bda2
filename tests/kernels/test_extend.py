"""Extend attention over a pruned prefix, dense and sparse, against explicit masks in fp64."""

from __future__ import annotations

import pytest
import torch

from kvzap_sglang.kernels.cpu import extend_dense, extend_sparse, visible_cells
from kvzap_sglang.kernels.cpu.extend import QUERY_BLOCK
from kvzap_sglang.kernels.encoding import CONDEMNED, NONE, VisibleCells

from . import oracle

DTYPES = [torch.float32, torch.bfloat16]


class Case:
    """A chunk of `tokens` after a prefix of `length`, in pools whose rows lie in random order."""

    def __init__(
        self, length: int, tokens: int, heads: int, group: int, dim: int, dtype: torch.dtype, rng: torch.Generator
    ) -> None:
        def normal(n: int, columns: int) -> torch.Tensor:
            return torch.randn(n, columns, dim, generator=rng).to(dtype)

        self.tokens, self.length, self.heads, self.scale = tokens, length, heads, dim**-0.5
        self.q, self.k, self.v = normal(tokens, heads * group), normal(tokens, heads), normal(tokens, heads)
        present = torch.ones(length, heads, dtype=torch.bool)
        kept = torch.rand(length, heads, generator=rng) < 0.4
        self.prefix = oracle.Prefix(normal(length, heads), normal(length, heads), kept, present)
        self.kept = torch.rand(tokens, heads, generator=rng) < 0.4
        self.k_pool, self.v_pool = (torch.full((length * heads + 9, dim), float("nan"), dtype=dtype) for _ in range(2))
        cells = torch.randperm(length * heads + 9, generator=rng)[: length * heads].view(length, heads)
        self.k_pool[cells], self.v_pool[cells] = self.prefix.k, self.prefix.v
        self.slots = torch.randperm(length + 5, generator=rng)[:length]
        self.table = torch.full((length + 5, heads), NONE, dtype=torch.int32)
        self.table[self.slots] = torch.where(kept, cells, cells | CONDEMNED).to(torch.int32)

    def prune(self, head: int, upto: int) -> None:
        """Free the condemned cells of positions below `upto`, and every cell of `head` there."""
        gone = ~self.prefix.kept
        gone[:, head] = True
        gone[upto:] = False
        self.prefix.kept[gone] = False
        self.prefix.present[gone] = False
        self.table[self.slots] = torch.where(gone, NONE, self.table[self.slots])

    def visible(self, window: int, detail: bool = False) -> VisibleCells:
        indptr, dense_from = torch.tensor([0, self.length]), torch.tensor([self.length - window])
        return visible_cells(self.table, self.slots, indptr, dense_from, detail=detail)

    def causal(self) -> torch.Tensor:
        return torch.ones(self.heads, self.tokens, self.tokens, dtype=torch.bool).tril()

    def ages(self, keys_from: int, keys: int) -> torch.Tensor:
        """`[T, keys]`: query position minus key position."""
        return torch.arange(self.length, self.length + self.tokens)[:, None] - torch.arange(keys_from, keys_from + keys)

    def check(self, out: torch.Tensor, prefix_seen: torch.Tensor, chunk_seen: torch.Tensor) -> None:
        expected = oracle.extend(self.q, self.k, self.v, self.prefix, prefix_seen, chunk_seen, self.scale)
        assert out.dtype == self.q.dtype and out.shape == self.q.shape
        tolerance = oracle.TOLERANCE[self.q.dtype]
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)

    def check_dense(self, window: int) -> None:
        visible = self.visible(window)
        out = extend_dense(self.q, self.k, self.v, self.k_pool, self.v_pool, visible, self.scale)
        in_window = torch.arange(self.length)[:, None] >= self.length - window
        seen = (self.prefix.kept | in_window) & self.prefix.present
        self.check(out, seen.T[:, None].expand(-1, self.tokens, -1), self.causal())

    def check_sparse(self, window: int) -> None:
        visible = self.visible(window, detail=True)
        own = (self.kept, self.length, window, self.scale)
        out = extend_sparse(self.q, self.k, self.v, self.k_pool, self.v_pool, visible, *own)
        near = self.ages(0, self.length) <= window
        prefix_seen = (near | self.prefix.kept.T[:, None]) & self.prefix.present.T[:, None]
        chunk_near = self.ages(self.length, self.tokens) <= window
        self.check(out, prefix_seen, self.causal() & (chunk_near | self.kept.T[:, None]))


SIZES = [(0, 1), (0, 130), (1, 1), (5, 64), (64, 65), (130, 1), (300, 257), (513, 129)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "tokens"), SIZES)
@pytest.mark.parametrize("window", [0, 7, 128])
def test_lengths_and_windows(length: int, tokens: int, window: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    case = Case(length, tokens, 3, 3, 64, dtype, rng)
    case.check_dense(window)
    case.check_sparse(window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8, 16])
def test_groups(group: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    case = Case(90, 70, 2, group, 32, dtype, rng)
    case.check_dense(16)
    case.check_sparse(16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_head_dimensions(dim: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    case = Case(70, 140, 2, 3, dim, dtype, rng)
    case.check_dense(20)
    case.check_sparse(20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("upto", [150, 200])
def test_pruned_cells_and_a_head_without_prefix(upto: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    case = Case(200, 150, 3, 3, 64, dtype, rng)
    case.prune(head=1, upto=upto)
    lengths = case.visible(50).indptr.diff().tolist()
    assert (lengths[1] == 0) == (upto == 200) and min(lengths[0], lengths[2]) > 50 * (upto < 200)
    case.check_dense(50)
    case.check_sparse(50)


@pytest.mark.parametrize("decisions", [False, True])
def test_chunk_all_condemned_or_all_kept(decisions: bool, rng: torch.Generator) -> None:
    case = Case(40, 2 * QUERY_BLOCK + 1, 2, 3, 64, torch.float32, rng)
    case.kept.fill_(decisions)
    case.prefix.kept.fill_(decisions)
    cells = case.table[case.slots] & ~CONDEMNED
    case.table[case.slots] = cells if decisions else cells | CONDEMNED
    case.check_sparse(9)


def test_sparse_does_not_depend_on_the_chunking(rng: torch.Generator) -> None:
    whole = Case(0, 300, 2, 3, 64, torch.float32, rng)
    arguments = (whole.k_pool, whole.v_pool, whole.visible(33, detail=True), whole.kept, 0, 33, whole.scale)
    expected = extend_sparse(whole.q, whole.k, whole.v, *arguments)
    cut = 171
    k_pool, v_pool = (x[:cut].reshape(-1, 64).contiguous() for x in (whole.k, whole.v))
    cells = torch.arange(cut * 2, dtype=torch.int32).view(cut, 2)
    table = torch.where(whole.kept[:cut], cells, cells | CONDEMNED)
    visible = visible_cells(table, torch.arange(cut), torch.tensor([0, cut]), torch.tensor([cut - 33]), detail=True)
    tail = (x[cut:] for x in (whole.q, whole.k, whole.v))
    got = extend_sparse(*tail, k_pool, v_pool, visible, whole.kept[cut:], cut, 33, whole.scale)
    torch.testing.assert_close(got, expected[cut:], rtol=1e-5, atol=1e-5)


def test_chunk_views_of_a_joint_projection(rng: torch.Generator) -> None:
    case = Case(50, 60, 2, 3, 64, torch.float32, rng)
    joint = torch.cat((case.q, case.k, case.v), dim=1)
    case.q, case.k, case.v = joint.split((6, 2, 2), dim=1)
    case.check_dense(10)
    case.check_sparse(10)


def test_no_token(rng: torch.Generator) -> None:
    case = Case(20, 0, 2, 3, 64, torch.float32, rng)
    visible = case.visible(5, detail=True)
    common = (case.q, case.k, case.v, case.k_pool, case.v_pool, visible)
    assert extend_dense(*common, 1.0).shape == (0, 6, 64)
    assert extend_sparse(*common, case.kept, 20, 5, 1.0).shape == (0, 6, 64)


def test_wrong_arguments_are_refused(rng: torch.Generator) -> None:
    case = Case(20, 6, 2, 3, 64, torch.float32, rng)
    pools = (case.k_pool, case.v_pool)
    two_requests = VisibleCells(torch.zeros(5, dtype=torch.int64), torch.empty(0, dtype=torch.int32))
    with pytest.raises(ValueError, match="2 segments, got 4"):
        extend_dense(case.q, case.k, case.v, *pools, two_requests, 1.0)
    with pytest.raises(ValueError, match="do not belong together"):
        extend_dense(case.q[:, :5], case.k, case.v, *pools, case.visible(5), 1.0)
    with pytest.raises(ValueError, match="detail=True"):
        extend_sparse(case.q, case.k, case.v, *pools, case.visible(5), case.kept, 20, 5, 1.0)
    with pytest.raises(ValueError, match="kept must be bool"):
        extend_sparse(case.q, case.k, case.v, *pools, case.visible(5, detail=True), case.kept[:4], 20, 5, 1.0)
