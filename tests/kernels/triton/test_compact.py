"""Page tables from lists of visible cells: Triton and the torch reference against the lists themselves."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from kvzap_sglang.kernels import triton as kernels
from kvzap_sglang.kernels.encoding import CELL_MASK, CONDEMNED
from kvzap_sglang.kernels.triton import VisibleChunks, reference
from kvzap_sglang.kernels.triton.compact import BLOCK

from .problems import DEVICE, Requests, empty_lists, random_requests
from .test_visible import lists

CHUNK, UNTOUCHED = 32, -77
EDGES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 0, 2 * CHUNK, 5 * CHUNK + 3, 0]
BOTH = pytest.mark.parametrize("compact", [kernels.compact_lists, reference.compact_lists], ids=["triton", "reference"])


def filled(requests: Requests, window: int, *, detail: bool = False) -> VisibleChunks:
    out = empty_lists(requests, CHUNK, detail=detail)
    dense_from = requests.dense_from(window)
    kernels.visible_chunks(requests.table, requests.req_to_token, requests.rows, requests.lengths, dense_from, out)
    return out


def check(compact, visible: VisibleChunks, capacity: int) -> list[int]:
    """Compacts and compares; returns the sizes of the segments."""
    heads = visible.cells.shape[1]
    wanted = [[cell & CELL_MASK for cell in found] for request in lists(visible, heads) for found in request]
    indptr = torch.full((len(wanted) + 1,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    indices = torch.full((capacity + 3,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    compact(visible, indptr, indices)
    assert indptr.tolist() == list(accumulate(map(len, wanted), initial=0))
    assert indices[: int(indptr[-1])].tolist() == [cell for found in wanted for cell in found]
    assert (indices[int(indptr[-1]) :] == UNTOUCHED).all()
    return [len(found) for found in wanted]


@BOTH
@pytest.mark.parametrize("kept", [[0.3], [0.0, 1.0, 0.4], [0.05, 0.9, 0.5, 0.3, 0.2, 1.0, 0.0, 0.6]])
@pytest.mark.parametrize("window", [-1, 8, 1000])
def test_segments_are_the_lists(compact, kept: list[float], window: int, rng: torch.Generator) -> None:
    """Requests of nothing, one position and around a chunk; heads that keep all and nothing."""
    requests = random_requests(EDGES, kept, rng, shared=20)
    sizes = check(compact, filled(requests, window), sum(EDGES) * len(kept))
    assert 0 in sizes and max(sizes) > CHUNK


@BOTH
def test_marks_are_stripped(compact, rng: torch.Generator) -> None:
    visible = filled(random_requests(EDGES, [0.3, 0.9], rng, shared=20), 40, detail=True)
    assert any(cell & CONDEMNED for request in lists(visible, 2) for found in request for cell in found)
    check(compact, visible, sum(EDGES) * 2)


@pytest.mark.parametrize("batch", [1, 16, 17])
def test_batches(batch: int, rng: torch.Generator) -> None:
    """Around a size of the kernel."""
    lengths = [5 * n % 90 for n in range(1, batch + 1)]
    check(kernels.compact_lists, filled(random_requests(lengths, [0.5, 0.1, 0.8], rng), 4), sum(lengths) * 3)


@pytest.mark.parametrize("chunks", [BLOCK - 1, BLOCK, BLOCK + 1])
def test_long_requests(chunks: int, rng: torch.Generator) -> None:
    """More chunks than are counted in one go."""
    lengths = [7, chunks * CHUNK - 3, 2 * CHUNK]
    check(kernels.compact_lists, filled(random_requests(lengths, [0.2], rng), 4), sum(lengths))


@pytest.mark.parametrize("programs", [1, 5])
def test_few_programs_take_all_chunks(programs: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvzap_sglang.kernels.triton.compact.PROGRAMS", programs)
    check(kernels.compact_lists, filled(random_requests(EDGES, [0.5, 0.1], rng), 8), sum(EDGES) * 2)


@BOTH
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_nothing_at_all(compact, lengths: list[int], rng: torch.Generator) -> None:
    """Buffers of no chunks, as an eager step of empty prefixes has them; and of some that hold nothing."""
    requests = random_requests(lengths, [0.5, 0.5], rng)
    visible = empty_lists(requests, CHUNK)
    assert check(compact, visible, 0) == [0, 0] * len(lengths)
    assert check(compact, visible._replace(cells=visible.cells[:0], counts=visible.counts[:0]), 0) == [0, 0] * len(
        lengths
    )
