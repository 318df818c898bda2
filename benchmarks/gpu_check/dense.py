"""What decode attention over the whole cache takes elsewhere: torch's, and FlashInfer's where it is installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_check.layers import Data

Calls = list[Callable[[], object]]
PAGE = 16


def contestants(data: Data) -> Iterator[tuple[str, Callable[[], Calls]]]:
    """By name, what makes a call per layer. All read the same contiguous K and V."""
    on_gpu = data.device.type == "cuda"
    sdpa = "SDPA flash" if on_gpu else "SDPA of the CPU"
    yield f"{sdpa}, group as rows", lambda: _sdpa(data, as_rows=True)
    yield f"{sdpa}, enable_gqa", lambda: _sdpa(data, as_rows=False)
    if on_gpu and importlib.util.find_spec("flashinfer"):
        yield "FlashInfer decode", lambda: _flashinfer(data)


def _sdpa(data: Data, *, as_rows: bool) -> Calls:
    """as_rows: the query heads of a group as rows of one query, which at decode is the same attention."""
    shape, layer = data.shape, data.shape.layer
    size = (data.layers, shape.batch, layer.kv_heads, shape.context, layer.dim)
    keys, values = data.k.view(size), data.v.view(size)
    query_rows = (layer.kv_heads, layer.group) if as_rows else (layer.q_heads, 1)
    queries = data.q.view(data.layers, shape.batch, *query_rows, layer.dim)
    on_gpu = data.device.type == "cuda"

    def call(i: int) -> Callable[[], object]:
        def run() -> object:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if on_gpu else contextlib.nullcontext():
                return F.scaled_dot_product_attention(queries[i], keys[i], values[i], enable_gqa=not as_rows)

        return run

    return [call(i) for i in range(data.layers)]


def _flashinfer(data: Data) -> Calls:
    """Paged, tensor cores, one plan for all layers. The same bytes seen as pages `[B * context / 16, 16, H, D]`."""
    flashinfer: Any = importlib.import_module("flashinfer")
    shape, layer, device = data.shape, data.shape.layer, data.device
    pages = shape.context // PAGE
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    indptr = torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * pages
    indices = torch.arange(shape.batch * pages, dtype=torch.int32, device=device)
    last = torch.full((shape.batch,), PAGE, dtype=torch.int32, device=device)
    wrapper.plan(
        indptr, indices, last, layer.q_heads, layer.kv_heads, layer.dim, PAGE,
        q_data_type=data.q.dtype, kv_data_type=data.k.dtype,
    )  # fmt: skip
    size = (data.layers, shape.batch * pages, PAGE, layer.kv_heads, layer.dim)
    keys, values, out = data.k.view(size), data.v.view(size), torch.empty_like(data.q)

    def call(i: int) -> Callable[[], object]:
        return lambda: wrapper.run(data.q[i], (keys[i], values[i]), out=out[i])

    return [call(i) for i in range(data.layers)]
