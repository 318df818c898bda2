"""Times of a prompt's chunk after its prefix, and of the scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.gpu_check.clock import seconds_per_call
from benchmarks.gpu_check.context import Context, Record, attempt
from benchmarks.gpu_check.layers import Data, Pruned, build, bytes_needed
from benchmarks.gpu_check.shapes import BYTES, CHUNKS, QWEN3_8B, TINY, DecodeShape, Layer, layer_of
from benchmarks.gpu_check.step import WINDOW
from kvzap_sglang.kernels.triton import VisibleChunks, first_chunks

PREFIXES, TOKENS = (0, 8192, 32768), 2048


@dataclass(frozen=True)
class _Chunk:
    """New tokens of one request: q `[T, Hq, D]`, k and v `[T, H, D]`, kept `[T, H]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kept: torch.Tensor


def extend_times(context: Context) -> Iterator[Record]:
    """One request's chunk of 2048 tokens after prefixes, dense and pruned to 33 %; torch's flash attention where it can."""
    layer = layer_of(TINY if context.tiny else QWEN3_8B)
    tokens = 32 if context.tiny else TOKENS
    for prefix in (0, 96) if context.tiny else PREFIXES:
        for kept, sparse in ((1.0, False), (0.33, False), (0.33, True)):
            record = {
                "kind": "extend", "models": layer.models, "tokens": tokens, "prefix": prefix, "kept": kept,
                "rule": "sparse" if sparse else "dense",
            }  # fmt: skip
            shape = DecodeShape(layer, 1, max(prefix, 1))
            reason = context.why_not(bytes_needed(shape, 1) + (1 << 28))
            if reason is not None:
                yield record | {"kind": "skipped", "what": "extend", "reason": reason}
                continue
            yield attempt(record, lambda: _extend(context, shape, tokens, prefix, kept, sparse))  # noqa: B023


def _extend(context: Context, shape: DecodeShape, tokens: int, prefix: int, kept: float, sparse: bool) -> Record:
    """Seconds of one layer, warm; operations of what the dense rule sees (4 D per pair of a query head)."""
    layer, device = shape.layer, context.device
    data = build(shape, 1, context.dtype, device, context.seed)
    lists = _prefix_lists(context, data, prefix, kept)
    chunk = _new_chunk(context, layer, tokens)
    starts, begins, count = (torch.tensor([n], device=device) for n in (prefix, 0, tokens))
    out = torch.empty_like(chunk.q)

    def run() -> None:
        context.kernels.extend(
            chunk.q, chunk.k, chunk.v, data.k[0], data.v[0], lists, starts, begins, count, layer.dim**-0.5, WINDOW,
            chunk.kept if sparse else None, out, tokens,
        )  # fmt: skip

    seconds = seconds_per_call([run], device)
    pairs = layer.group * (int(lists.counts[: int(lists.first[-1])].sum()) * tokens + layer.kv_heads * tokens**2 // 2)
    found = {"seconds": seconds, "dense_rule_flops": 4 * layer.dim * pairs}
    return found | ({} if prefix else {"sdpa_seconds": _causal_sdpa(chunk, device)})


def _new_chunk(context: Context, layer: Layer, tokens: int) -> _Chunk:
    rng = torch.Generator(context.device).manual_seed(context.seed)
    sizes = [(tokens, heads, layer.dim) for heads in (layer.q_heads, layer.kv_heads, layer.kv_heads)]
    q, k, v = (torch.empty(s, dtype=context.dtype, device=context.device).normal_(generator=rng) for s in sizes)
    return _Chunk(q, k, v, torch.rand(tokens, layer.kv_heads, generator=rng, device=context.device) < 0.33)


def _prefix_lists(context: Context, data: Data, prefix: int, kept: float) -> VisibleChunks:
    """With positions; filled by our kernel."""
    pruned, chunk = Pruned(data, kept, "holes", context.seed), 64 if context.tiny else CHUNKS[0]
    data.lengths.fill_(prefix)
    chunks, heads = max(1, -(-prefix // chunk)), data.shape.layer.kv_heads
    cells = torch.zeros(chunks, heads, chunk, dtype=torch.int32, device=data.device)
    first = first_chunks(data.lengths, chunk, torch.empty(2, dtype=torch.int32, device=data.device))
    lists = VisibleChunks(first, cells, torch.zeros_like(cells[:, :, 0]), torch.zeros_like(cells))
    context.kernels.visible_chunks(
        pruned.tables[0], pruned.req_to_token, data.rows, data.lengths, data.lengths - WINDOW, lists
    )
    return lists


def _causal_sdpa(chunk: _Chunk, device: str) -> float:
    q, k, v = (x.transpose(0, 1)[None] for x in (chunk.q, chunk.k, chunk.v))
    return seconds_per_call([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)], device)


def score_times(context: Context) -> Iterator[Record]:
    """The second half of Qwen3-8B's surrogate, for decode batches and a prefill chunk."""
    heads, units = (2, 32) if context.tiny else (QWEN3_8B.kv_heads, QWEN3_8B.units)
    for tokens in (3,) if context.tiny else (8, 64, 8192):
        rng = torch.Generator(context.device).manual_seed(context.seed)
        shapes = [(tokens, units), (heads, units), (heads,), (tokens, heads)]
        tensors = [torch.empty(s, dtype=context.dtype, device=context.device).normal_(generator=rng) for s in shapes]
        record = {"kind": "scores", "tokens": tokens, "units": units, "heads": heads}
        record["bytes"] = BYTES * sum(tensor.numel() for tensor in tensors)
        yield attempt(
            record,
            lambda: {"seconds": seconds_per_call([lambda: context.kernels.mlp_scores(*tensors)], context.device)},  # noqa: B023
        )
