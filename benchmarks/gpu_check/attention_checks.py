"""Lists, decode and extend attention against the rule, in fp64. What no request sees is NaN in the pools."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import accumulate

import torch

from benchmarks.gpu_check.checked import Check
from benchmarks.gpu_check.comparing import TOLERANCE, Case, equal, error
from benchmarks.gpu_check.kernels import torch_forms
from benchmarks.gpu_check.problems import POISON, WINDOW, Requests, empty_lists, normal, random_requests
from kvzap_sglang.kernels.encoding import CELL_MASK, CONDEMNED
from kvzap_sglang.kernels.triton import VisibleChunks


def visible_cases(check: Check) -> Iterator[Case]:
    """Independent of the dtype."""
    for batch in (1, 16, 17, 200):
        yield Case("place_chunks", f"{batch} requests", functools.partial(_place, check, batch))
    for chunk in check.sizes.chunks:
        for kept in ([0.3], [0.0, 1.0, 0.4], [0.05, 0.9, 0.5, 0.3, 0.2, 1.0, 0.0, 0.6]):
            for detail in (False, True):
                name = f"chunk {chunk}, {len(kept)} heads, {'positions too' if detail else 'cells only'}"
                yield Case("visible_chunks", name, functools.partial(_visible, check, chunk, kept, detail))


def _place(check: Check, batch: int, rng: torch.Generator) -> float:
    lengths = torch.randint(0, 4000, (batch,), generator=rng, device=rng.device).to(check.device)
    first = torch.full((batch + 1,), POISON, dtype=torch.int32, device=check.device)
    dense_from = torch.full((batch,), POISON, device=check.device)
    check.kernels.place_chunks(lengths, 512, WINDOW, first, dense_from)
    counted = [0]
    for length in lengths.tolist():
        counted.append(counted[-1] + -(-length // 512))
    expected = torch.tensor(counted, dtype=torch.int32, device=check.device)
    return max(equal(first, expected, "first"), equal(dense_from, lengths - 1 - WINDOW, "dense_from"))


def _visible(check: Check, chunk: int, kept: list[float], detail: bool, rng: torch.Generator) -> float:
    """Against the rule, position by position; and nothing else may be touched."""
    requests = random_requests(check.sizes.edges(chunk), kept, check.device, rng, shared=20)
    found = empty_lists(requests, chunk, detail=detail)
    expected = empty_lists(requests, chunk, detail=detail)
    dense_from = requests.lengths - 1 - WINDOW
    check.kernels.visible_chunks(
        requests.table, requests.req_to_token, requests.rows, requests.lengths, dense_from, found
    )
    for b, start in enumerate(dense_from.tolist()):
        mask = CELL_MASK | CONDEMNED if detail else CELL_MASK
        _list_by_the_rule(expected, b, requests.seen(b, start), requests.entries(b) & mask)
    pairs = zip(found, expected, ("first", "cells", "counts", "positions"), strict=True)
    return max(equal(f, e, what) for f, e, what in pairs if f is not None and e is not None)


def compact_cases(check: Check) -> Iterator[Case]:
    """Independent of the dtype."""
    for chunk in check.sizes.chunks:
        for kept in ([0.3], [0.0, 1.0, 0.4], [0.05, 0.9, 0.5, 0.3, 0.2, 1.0, 0.0, 0.6]):
            for lengths in (check.sizes.edges(chunk), [chunk + 1]):
                run = functools.partial(_compact, check, chunk, lengths, kept)
                yield Case("compact_lists", f"chunk {chunk}, {len(kept)} heads, {len(lengths)} requests", run)


def _compact(check: Check, chunk: int, lengths: list[int], kept: list[float], rng: torch.Generator) -> float:
    """The cells that each head sees by the rule, behind one another; what lies after them stays."""
    requests, heads = random_requests(lengths, kept, check.device, rng, shared=20), len(kept)
    dense_from, lists = requests.lengths - 1 - WINDOW, empty_lists(requests, chunk)
    torch_forms().visible_chunks(
        requests.table, requests.req_to_token, requests.rows, requests.lengths, dense_from, lists
    )
    starts = dense_from.tolist()
    parts = [requests.seen_cells(b, head, starts[b]) for b in range(len(lengths)) for head in range(heads)]
    sizes = torch.tensor([0, *(len(part) for part in parts)], device=check.device)
    indptr = torch.full((len(sizes),), POISON, dtype=torch.int32, device=check.device)
    indices = torch.full((sum(lengths) * heads + 5,), POISON, dtype=torch.int32, device=check.device)
    expected = indices.clone()
    expected[: int(sizes.sum())] = torch.cat(parts).to(torch.int32)
    check.kernels.compact_lists(lists, indptr, indices)
    return max(equal(indptr, sizes.cumsum(dim=0), "indptr"), equal(indices, expected, "indices"))


def _list_by_the_rule(out: VisibleChunks, request: int, seen: torch.Tensor, entries: torch.Tensor) -> None:
    """One request's lists. seen, entries: `[length, H]`."""
    chunk = out.cells.shape[2]
    for j in range(-(-len(seen) // chunk)):
        at, of = int(out.first[request]) + j, slice(j * chunk, (j + 1) * chunk)
        out.counts[at] = seen[of].sum(dim=0)
        for head in range(seen.shape[1]):
            where = of.start + seen[of, head].nonzero().flatten()
            out.cells[at, head, : len(where)] = entries[where, head].to(torch.int32)
            if out.positions is not None:
                out.positions[at, head, : len(where)] = where.to(torch.int32)


def decode_cases(check: Check, part: str) -> Iterator[Case]:
    """part: "lengths", "groups" or "dims"."""
    ragged = [0, 1, 70, min(900, check.sizes.long)]
    if part == "lengths":
        for chunk in check.sizes.chunks:
            yield _decode_case(
                check, f"lengths, chunk {chunk}", check.sizes.edges(chunk), [0.0, 1.0, 0.3], 4, 64, chunk
            )
    elif part == "groups":
        for group in check.sizes.groups:
            yield _decode_case(check, f"group {group}", ragged, [0.6, 0.2], group, 64, check.sizes.chunks[0])
    else:
        for dim in check.sizes.dims:
            yield _decode_case(check, f"head dim {dim}", ragged, [0.6, 0.05], 4, dim, check.sizes.chunks[-1])


def _decode_case(
    check: Check, name: str, lengths: list[int], kept: list[float], group: int, dim: int, chunk: int
) -> Case:
    return Case("chunked_decode", name, functools.partial(_decode, check, lengths, kept, group, dim, chunk))


def _decode(
    check: Check, lengths: list[int], kept: list[float], group: int, dim: int, chunk: int, rng: torch.Generator
) -> float:
    heads, batch, device = len(kept), len(lengths), check.device
    requests = random_requests(lengths, kept, device, rng, shared=40)
    dense_from = requests.lengths - 1 - WINDOW
    lists = empty_lists(requests, chunk)
    torch_forms().visible_chunks(
        requests.table, requests.req_to_token, requests.rows, requests.lengths, dense_from, lists
    )
    k, v = requests.pools(dim, check.dtype, dense_from.tolist(), rng)
    q = normal((batch, heads * group, dim), check.dtype, device, rng)
    part = torch.full((len(lists.counts), heads * group, dim), torch.nan, device=device)
    out, lse = torch.full_like(q, torch.nan), torch.full((batch, heads * group), torch.nan, device=device)
    check.kernels.chunked_decode(q, k, v, lists, dim**-0.5, part, part[:, :, 0].clone(), out, lse)
    exact = torch.zeros(q.shape, dtype=torch.float64, device=device)
    exact_lse = torch.full(lse.shape, -torch.inf, dtype=torch.float64, device=device)
    for b, start in enumerate(dense_from.tolist()):
        for head in range(heads):
            cells, of = requests.seen_cells(b, head, start), slice(head * group, (head + 1) * group)
            if len(cells):
                scores = q[b, of].double() @ k[cells].double().T * dim**-0.5
                exact[b, of], exact_lse[b, of] = scores.softmax(dim=1) @ v[cells].double(), scores.logsumexp(dim=1)
    return max(error(out, exact, TOLERANCE[check.dtype]), error(lse, exact_lse, 1e-4, "lse"))


def extend_cases(check: Check, part: str) -> Iterator[Case]:
    """part: "lengths", "groups" or "dims"; each by the dense and by the sparse rule."""
    chunk = check.sizes.chunks[0]
    prefixes, tokens = [0, 1, chunk, chunk + 1, 3 * chunk + 5, 0, 70], [1, 64, 3, 43, 17, 130, 1]
    for sparse in (False, True):
        rule = "sparse" if sparse else "dense"
        if part == "lengths":
            run = functools.partial(_extend, check, prefixes, tokens, [0.0, 1.0, 0.4], 3, 64, sparse)
            yield Case("extend", f"lengths, {rule}", run)
        elif part == "groups":
            for group in check.sizes.extend_groups:
                run = functools.partial(_extend, check, [0, 90], [20, 33], [0.6, 0.1], group, 64, sparse)
                yield Case("extend", f"group {group}, {rule}", run)
        else:
            for dim in check.sizes.dims:
                run = functools.partial(_extend, check, [70, 5], [9, 40], [0.5], 4, dim, sparse)
                yield Case("extend", f"head dim {dim}, {rule}", run)


def _extend(
    check: Check, prefixes: list[int], tokens: list[int], kept_part: list[float], group: int, dim: int,
    sparse: bool, rng: torch.Generator,
) -> float:  # fmt: skip
    heads, device, chunk = len(kept_part), check.device, check.sizes.chunks[0]
    requests = random_requests(prefixes, kept_part, device, rng, shared=10)
    # Dense: the window as it stood at the hit. Sparse: all that the first token of the chunk can see.
    dense_from = requests.lengths - WINDOW
    lists = empty_lists(requests, chunk, detail=sparse)
    torch_forms().visible_chunks(
        requests.table, requests.req_to_token, requests.rows, requests.lengths, dense_from, lists
    )
    total = sum(tokens) + len(tokens)
    fused = normal((total, (group + 2) * heads * dim), check.dtype, device, rng)  # rows of a fused projection lie apart
    q, k, v = (
        part.view(total, -1, dim) for part in fused.split([group * heads * dim, heads * dim, heads * dim], dim=1)
    )
    pools = requests.pools(dim, check.dtype, dense_from.tolist(), rng)
    kept = (torch.rand(total, heads, generator=rng) < 0.5).to(device)
    begins = list(accumulate((n + 1 for n in tokens), initial=0))[:-1]  # a token of nobody after each chunk
    bounds = [torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (begins, tokens)]
    out = torch.full((total, heads * group, dim), torch.nan, dtype=check.dtype, device=device)
    check.kernels.extend(
        q, k, v, *pools, lists, requests.lengths, *bounds, dim**-0.5, WINDOW, kept if sparse else None, out, max(tokens)
    )
    exact = torch.full(out.shape, torch.nan, dtype=torch.float64, device=device)
    for b, (begin, length) in enumerate(zip(begins, tokens, strict=True)):
        own = slice(begin, begin + length)
        for head in range(heads):
            of, start = slice(head * group, (head + 1) * group), int(dense_from[b])
            cells = requests.seen_cells(b, head, start)
            keys, values = (
                torch.cat([p[cells], new[own, head]]).double() for p, new in zip(pools, (k, v), strict=True)
            )
            seen = _seen_by_chunk(requests, b, head, start, kept[own, head] if sparse else None, length)
            scores = torch.einsum("tgd,nd->tgn", q[own, of].double(), keys) * dim**-0.5
            scores = scores.masked_fill(~seen[:, None, :], -torch.inf)
            exact[own, of] = scores.softmax(dim=2) @ values
    return error(out, exact, TOLERANCE[check.dtype])


def _seen_by_chunk(
    requests: Requests, request: int, head: int, dense_from: int, kept: torch.Tensor | None, tokens: int
) -> torch.Tensor:
    """What each token of a chunk sees of the listed prefix, then of the chunk: bool `[tokens, listed + tokens]`.

    kept: bool `[tokens]` by the sparse rule, None by the dense one.
    """
    mask = requests.seen(request, dense_from)[:, head]
    own = torch.arange(tokens, device=requests.device)
    causal = own[:, None] >= own[None, :]
    if kept is None:
        return torch.cat([torch.ones(tokens, int(mask.sum()), dtype=torch.bool, device=mask.device), causal], dim=1)
    age = len(mask) + own[:, None] - mask.nonzero().flatten()[None, :]
    prefix = (requests.entries(request)[mask, head] < CONDEMNED)[None, :] | (age <= WINDOW)
    return torch.cat([prefix, causal & (kept[None, :] | (own[:, None] - own[None, :] <= WINDOW))], dim=1)
