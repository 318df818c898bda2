"""FlashInfer's own Python on a CPU: its wrappers over its own planner, and over the addressing of its kernels in torch."""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import pytest
import torch

from . import fake_flashinfer, flashinfer_kernel
from .flashinfer_planner import library, plan_into, schedule

WRAPPERS = (
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
)


class Module:
    """What FlashInfer compiles for batch prefill, with the same arguments in the same places."""

    def plan(self, floats: torch.Tensor, ints: torch.Tensor, pinned: torch.Tensor, *args: Any) -> list[int]:
        qo_indptr, kv_indptr, _, rows, batch, q_heads, kv_heads, page, graph, dim, dim_vo, *rest = args
        _, window, fixed, disable_split_kv, colocated, uniform = rest
        assert (rows, batch) == (int(qo_indptr[-1]), len(qo_indptr) - 1) and pinned.shape == ints.shape
        assert (page, dim_vo, window, fixed, colocated, uniform) == (1, dim, -1, -1, 0, 0)
        return [
            *plan_into(
                ints, len(floats), qo_indptr, kv_indptr, (q_heads, kv_heads), dim,
                graph=graph, disable_split_kv=disable_split_kv, multiprocessors=132,
            )
        ]  # fmt: skip

    def paged_run(self, floats: torch.Tensor, ints: torch.Tensor, info: list[int], *args: Any) -> None:
        q, k, v, qo_indptr, indptr, indices, last_page_len, out, lse, mask, layout, window, _, *rest = args
        assert (mask, layout, window, rest[7]) == (0, 0, -1, q.shape[2] ** -0.5) and (last_page_len == 1).all()
        tables = flashinfer_kernel.Tables(indptr.tolist(), indices.long(), k[:, 0, 0], v[:, 0, 0])
        planned = schedule(info, ints, len(qo_indptr) - 1)
        results = flashinfer_kernel.run(planned, q, qo_indptr.diff().long(), tables)
        for result, target in zip(results, (out, lse), strict=True):
            if target is not None:
                target.copy_(result)

    def ragged_run(self, floats: torch.Tensor, ints: torch.Tensor, info: list[int], *args: Any) -> None:
        q, k, v, qo_indptr, kv_indptr, out, lse, mask, layout, window, _, *rest = args
        assert (mask, layout, window, rest[7]) == (1, 0, -1, q.shape[2] ** -0.5) and torch.equal(qo_indptr, kv_indptr)
        bounds = qo_indptr.tolist()
        for a, b in pairwise(bounds):
            out[a:b], lse[a:b] = fake_flashinfer.attended(q[a:b], k[a:b], v[a:b], rest[7], causal=True)


def use_real_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `fake_flashinfer` offer FlashInfer's own wrappers. Skips the test where they cannot be had."""
    library()
    flashinfer: Any = pytest.importorskip("flashinfer", reason="FlashInfer's Python is not installed")
    prefill, decode, cascade = (
        importlib.import_module(f"flashinfer.{name}") for name in ("prefill", "decode", "cascade")
    )
    for module in (prefill, decode):
        monkeypatch.setattr(module, "get_batch_prefill_module", lambda *args: Module())
    merge, empty = fake_flashinfer.merge_state_in_place, torch.empty

    class Cascade:
        @staticmethod
        def merge_state_in_place(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any) -> None:
            merge(v, s, v_other, s_other)

    def logged(wrapper: Any, method: str) -> Any:
        original = getattr(wrapper, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            fake_flashinfer.calls.append(f"{wrapper.__name__}.{method}")
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(cascade, "get_cascade_module", lambda: Cascade)
    monkeypatch.setattr(fake_flashinfer, "merge_state_in_place", flashinfer.merge_state_in_place)
    # No host memory can be pinned here.
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    for name in WRAPPERS:
        wrapper = getattr(flashinfer, name)
        monkeypatch.setattr(fake_flashinfer, name, wrapper)
        for method in ("plan", "run"):
            monkeypatch.setattr(wrapper, method, logged(wrapper, method))
