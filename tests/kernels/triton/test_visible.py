"""Lists of visible cells: Triton against the torch reference, and both against the rule itself."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kvzap_sglang.kernels import triton as kernels
from kvzap_sglang.kernels.encoding import CELL_MASK, CONDEMNED
from kvzap_sglang.kernels.triton import VisibleChunks, reference

from .problems import DEVICE, Requests, empty_lists, random_requests

CHUNK = 32
EDGES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 3, 0]


def lists(found: VisibleChunks, heads: int) -> list[list[list[int]]]:
    """Cells of every request and head, in order."""
    first = found.first.tolist()
    return [
        [
            [int(cell) for c in range(a, b) for cell in found.cells[c, head, : int(found.counts[c, head])]]
            for head in range(heads)
        ]
        for a, b in pairwise(first)
    ]


def by_the_rule(requests: Requests, window: int) -> list[list[list[int]]]:
    """DESIGN's rule, entry by entry."""
    heads = requests.table.shape[1]
    found: list[list[list[int]]] = []
    for row, length in zip(requests.rows.tolist(), requests.lengths.tolist(), strict=True):
        found.append([[] for _ in range(heads)])
        for position in range(length):
            entries = requests.table[int(requests.req_to_token[row, position])].tolist()
            for head, entry in enumerate(entries):
                if entry >= 0 and (not entry & CONDEMNED or (length - 1) - position <= window):
                    found[-1][head].append(entry & CELL_MASK)
    return found


@pytest.mark.parametrize("make", [kernels.visible_chunks, reference.visible_chunks], ids=["triton", "reference"])
@pytest.mark.parametrize("kept", [[0.3], [0.0, 1.0, 0.4], [0.05, 0.9, 0.5, 0.3, 0.2, 1.0, 0.0, 0.6]])
@pytest.mark.parametrize("window", [0, 8, 1000])
def test_lists_follow_the_rule(make, kept: list[float], window: int, rng: torch.Generator) -> None:
    requests = random_requests(EDGES, kept, rng, shared=20)
    out = empty_lists(requests, CHUNK)
    cells, counts = out.cells.clone(), out.counts.clone()
    dense_from = requests.dense_from(window)
    make(requests.table, requests.req_to_token, requests.rows, requests.lengths, dense_from, out)
    assert lists(out, len(kept)) == by_the_rule(requests, window)
    # Nothing outside the lists is touched: other chunks may belong to a replay of another batch.
    last = int(out.first[-1])
    assert torch.equal(out.cells[last:], cells[last:]) and torch.equal(out.counts[last:], counts[last:])


def test_positions_and_marks_on_request(rng: torch.Generator) -> None:
    """As in the reference, list by list; an entry keeps its mark."""
    requests = random_requests(EDGES, [0.3, 0.9], rng, shared=20)
    found, expected = (empty_lists(requests, CHUNK, detail=True) for _ in range(2))
    rest = (requests.rows, requests.lengths, requests.dense_from(40))
    kernels.visible_chunks(requests.table, requests.req_to_token, *rest, found)
    reference.visible_chunks(requests.table, requests.req_to_token, *rest, expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert (found.cells[:, 0][found.positions[:, 0] < 1 << 29] >= CONDEMNED).any()


@pytest.mark.parametrize("programs", [1, 2, 3, 1000])
def test_a_graph_has_as_many_programs_whatever_the_batch(
    programs: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer than chunks, or more; padding rows have length 1 and slot 0."""
    monkeypatch.setattr("kvzap_sglang.kernels.triton.visible.PROGRAMS", programs)
    requests = random_requests([5, 3 * CHUNK + 1, 70], [0.5, 0.5], rng)
    rows = torch.cat([requests.rows, requests.rows[:1]])
    lengths = torch.cat([requests.lengths, torch.ones_like(requests.lengths[:1])])
    requests.req_to_token[requests.rows[0], 0] = 0
    padded = Requests(requests.table, requests.req_to_token, rows, lengths, requests.cells)
    out = empty_lists(padded, CHUNK)
    kernels.visible_chunks(padded.table, padded.req_to_token, rows, lengths, padded.dense_from(8), out)
    found = lists(out, 2)
    assert found[3] == [[], []] and found == by_the_rule(padded, 8)


@pytest.mark.parametrize("place", [kernels.place_chunks, reference.place_chunks], ids=["triton", "reference"])
@pytest.mark.parametrize("batch", [1, 15, 16, 17, 100])
def test_places_of_a_decode_step(place, batch: int, rng: torch.Generator) -> None:
    lengths = torch.randint(0, 3 * CHUNK, (batch,), generator=rng).to(DEVICE)
    lengths[0] = CHUNK
    first = torch.full((batch + 2,), -9, dtype=torch.int32, device=DEVICE)
    dense_from = torch.full((batch + 1,), -9, device=DEVICE)
    place(lengths, CHUNK, 8, first[:-1], dense_from[:-1])
    wanted = [0]
    for length in lengths.tolist():
        wanted.append(wanted[-1] + -(-length // CHUNK))
    assert first.tolist() == [*wanted, -9]
    assert dense_from.tolist() == [*(length - 9 for length in lengths.tolist()), -9]


def test_an_empty_batch(rng: torch.Generator) -> None:
    requests = random_requests([0], [0.5, 0.5], rng)
    out = empty_lists(requests, CHUNK)
    dense_from = requests.dense_from(8)
    kernels.visible_chunks(requests.table, requests.req_to_token, requests.rows, requests.lengths, dense_from, out)
    assert out.first.tolist() == [0, 0]
