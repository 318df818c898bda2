"""Times of listing and of decode attention per layer, and of dense attention over the same cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import torch

from benchmarks.gpu_check.clock import seconds_per_call
from benchmarks.gpu_check.comparing import TOLERANCE, error
from benchmarks.gpu_check.context import Context, Record, attempt, attempt_all
from benchmarks.gpu_check.dense import contestants
from benchmarks.gpu_check.layers import Data, Lists, Pruned, build, bytes_needed, layers_needed
from benchmarks.gpu_check.shapes import BYTES, CHUNKS, KEPT, DecodeShape, decode_shapes
from kvzap_sglang.kernels.encoding import CELL_MASK, CONDEMNED

SMALL_CHUNK = 256
"""Also tried where there is little to do in parallel: at most 8 requests."""
SAMPLED = 4
"""(request, head) pairs of every timed configuration whose output is compared with fp64."""


def decode_times(context: Context) -> Iterator[Record]:
    """Every shape: dense attention elsewhere, then ours for each kept fraction, layout and chunk size."""
    for shape in decode_shapes(context.tiny):
        named = {"models": shape.layer.models, **asdict(shape.layer), "batch": shape.batch, "context": shape.context}
        layers = layers_needed(shape, context.device)
        reason = context.why_not(bytes_needed(shape, layers))
        if reason is not None:
            yield {"kind": "skipped", "what": "decode", **named, "reason": reason}
            continue
        yield from attempt_all({"kind": "decode", **named}, lambda: _times_of(context, shape, layers, named))  # noqa: B023


def _times_of(context: Context, shape: DecodeShape, layers: int, named: Record) -> Iterator[Record]:
    data = build(shape, layers, context.dtype, context.device, context.seed)
    for name, make in contestants(data):
        record = {"kind": "dense", "name": name, **named, "layers_timed": layers}
        yield attempt(record, lambda: {"seconds": seconds_per_call(make(), context.device)})  # noqa: B023
    cases = [*(("holes", kept) for kept in KEPT), ("scattered", 1.0), ("scattered", 0.33)]
    if context.tiny:
        cases = cases[2:]
    for layout, kept in cases:
        reason = context.why_not(0)
        if reason is not None:
            yield {"kind": "skipped", "what": f"decode, kept {kept}, {layout}", **named, "reason": reason}
            continue
        pruned = Pruned(data, kept, layout, context.seed)
        for chunk in _chunks(context, shape):
            record = {"kind": "decode", **named, "kept": kept, "layout": layout, "chunk": chunk}
            yield attempt(record, lambda: _time(context, data, pruned, chunk))  # noqa: B023


def _chunks(context: Context, shape: DecodeShape) -> tuple[int, ...]:
    if context.tiny:
        return (64,)
    return (SMALL_CHUNK, *CHUNKS) if shape.batch <= 8 else CHUNKS


def _time(context: Context, data: Data, pruned: Pruned, chunk: int) -> Record:
    """Seconds of one layer. visible: of the pairs, what the lists hold (what is kept, and the window).

    `seconds` is listing and attention; compacting the lists (for FlashInfer) is no part of it.
    """
    lists = Lists(data, pruned, chunk)
    listing = seconds_per_call(lists.listing(context.kernels), context.device)
    lists.out.fill_(torch.nan)
    attention = seconds_per_call(lists.attending(context.kernels), context.device)
    compacting = seconds_per_call(lists.compacting(context.kernels), context.device)
    worst = _worst_of_sample(data, pruned, lists)
    kv_bytes = 2 * BYTES * data.shape.layer.dim * lists.visible_pairs
    return {
        "layers_timed": data.layers,
        "visible": lists.visible_pairs / data.shape.kv_rows,
        "kv_bytes": kv_bytes,
        "list_seconds": listing,
        "attention_seconds": attention,
        "seconds": listing + attention,
        "compact_seconds": compacting,
        "attention_kv_bytes_per_s": kv_bytes / attention,
        "kv_bytes_per_s": kv_bytes / (listing + attention),
        "worst_error_of_allowed": worst,
    }


def _worst_of_sample(data: Data, pruned: Pruned, lists: Lists) -> float:
    """What was timed is right: some heads' outputs, of the last layer in the rotation, against the rule in fp64."""
    layer, at = data.shape.layer, data.layers - 1
    rng = torch.Generator().manual_seed(len(lists.visible[0].counts))
    position = torch.arange(data.shape.context, device=data.device)
    worst = 0.0
    for _ in range(SAMPLED):
        b, head = (int(torch.randint(n, (), generator=rng)) for n in (data.shape.batch, layer.kv_heads))
        entries = pruned.tables[at, pruned.req_to_token[b].long(), head]
        seen = (entries >= 0) & ((entries < CONDEMNED) | (position >= pruned.dense_from[b]))
        cells, of = (entries[seen] & CELL_MASK).long(), slice(head * layer.group, (head + 1) * layer.group)
        scores = data.q[at, b, of].double() @ data.k[at, cells].double().T * layer.dim**-0.5
        exact = scores.softmax(dim=1) @ data.v[at, cells].double()
        worst = max(worst, error(lists.out[at, b, of], exact, TOLERANCE[data.q.dtype], f"request {b}, head {head}"))
    return worst
