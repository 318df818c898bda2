"""Attention backend of GPUs whose dense prompt chunks are attended by FlashInfer, and everything else by Triton.

The one module that imports FlashInfer. How it is made to serve heads that keep different cells: `flashinfer_wrappers`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

from kvzap_sglang.attention import device_lists
from kvzap_sglang.attention.choice import FLAG
from kvzap_sglang.attention.device_lists import QueryGroup, empty_lists
from kvzap_sglang.attention.flashinfer_wrappers import (
    FLASHINFER_VERSION,
    REMEDY,
    DensePrompts,
    Heads,
    SingleQueries,
)
from kvzap_sglang.attention.metadata import Piece
from kvzap_sglang.attention.triton import KVPressTritonBackend
from kvzap_sglang.guard import GuardError
from kvzap_sglang.kernels.triton import reference
from kvzap_sglang.runtime import KVPressRuntime

logger = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


def flashinfer_fault(*, imports: bool = True) -> str | None:
    """Why FlashInfer cannot be used here, None when it can.

    imports: try that too; it asks for the GPUs' properties, so not in a process that has no business with them.
    """
    try:
        found = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return f"flashinfer-python is not installed: {REMEDY}"
    if found != FLASHINFER_VERSION:
        return f"it was written for flashinfer-python=={FLASHINFER_VERSION}, found {found}: {REMEDY}"
    try:
        if imports:
            importlib.import_module("flashinfer")
    except Exception as error:
        return f"flashinfer cannot be imported ({error!r}): repair the installation, or give {FLAG} triton"
    return None


class KVPressFlashInferBackend(KVPressTritonBackend):
    """The Triton backend, but dense chunks of prompts are attended by FlashInfer.

    Sparse chunks are not: which of a chunk's own tokens a head sees cannot be told to FlashInfer. Nor are single
    queries, unless asked for, nor recorded steps, ever.
    """

    def __init__(self, model_runner: Any, runtime: KVPressRuntime, *, singles: bool = False) -> None:
        """Compiles what steps need. Raises `GuardError` when FlashInfer does not do here what is asked of it.

        singles: have FlashInfer attend single queries too.
        """
        super().__init__(model_runner, runtime)
        self._prompts: DensePrompts | None = None
        self._singles: SingleQueries | None = None
        model, cells = model_runner.model_config, runtime.cells
        group = model.num_attention_heads // model.get_total_num_kv_heads()
        heads = Heads(cells.layout.heads, group, cells.k.shape[1], cells.k.dtype)
        alike = model.dtype == heads.dtype and cells.v.shape[1] == heads.dim
        if not alike or heads.dim not in HEAD_DIMS or heads.dtype not in DTYPES:
            logger.warning(
                "kv press: FlashInfer does not attend head dim %d in %s with cells in %s: Triton attends everything",
                heads.dim,
                model.dtype,
                heads.dtype,
            )
            return
        if fault := flashinfer_fault():
            raise GuardError(f"{FLAG} flashinfer: {fault}")
        logger.info("kv press: FlashInfer attends dense chunks; its kernels are compiled and checked, minutes at first")
        flashinfer = importlib.import_module("flashinfer")
        self._prompts = DensePrompts(flashinfer, heads, self.device)
        self._singles = SingleQueries(flashinfer, heads, self.device) if singles else None
        check(self._prompts, self._singles, self.device)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """And plan what FlashInfer will attend."""
        super().init_forward_metadata(forward_batch)
        singles, dense, _ = self._groups or (None, None, None)
        if self._prompts is not None and dense is not None:
            longer = (piece for piece in self._pieces(forward_batch) if piece.end > piece.start + 1)
            self._prompts.plan([piece for piece in longer if piece.dense], dense)
        if self._singles is not None and singles is not None:
            alone = [piece for piece in self._pieces(forward_batch) if piece.end == piece.start + 1]
            self._singles.plan(alone, singles)

    def _attend_singles(self, q: torch.Tensor, group: QueryGroup, layer: int, scale: float) -> torch.Tensor:
        # A recorded step has a group of its own, for which nothing was planned.
        if self._singles is None or not self._singles.planned(group, scale):
            return super()._attend_singles(q, group, layer, scale)
        self._list(group, layer)
        return self._singles.attend(q, self._runtime.cells.k, self._runtime.cells.v, group.lists)

    def _attend_pieces(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: QueryGroup,
        layer: int,
        scale: float,
        kept: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        prompts = self._prompts
        if kept is not None or prompts is None or not prompts.planned(group, scale):
            super()._attend_pieces(q, k, v, group, layer, scale, kept, out)
            return
        self._list(group, layer)
        prompts.attend(q, k, v, self._runtime.cells.k, self._runtime.cells.v, group.lists, out)


def check(prompts: DensePrompts, singles: SingleQueries | None, device: torch.device) -> None:
    """Attend a small step and compare with plain torch; nothing is compiled after it. Raises `GuardError`."""
    try:
        equal = [torch.allclose(a.float(), b.float(), rtol=0, atol=0.05) for a, b in sample(prompts, singles, device)]
    except GuardError:
        raise
    except Exception as error:
        text = f"{FLAG} flashinfer: it fails in a step of a few tokens ({str(error)[:500]}): give {FLAG} triton"
        raise GuardError(text) from error
    if not all(equal):
        raise GuardError(f"{FLAG} flashinfer: it does not attend what it is given on this machine: give {FLAG} triton")


def sample(
    prompts: DensePrompts, singles: SingleQueries | None, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What is attended in a small step, and what should be: two chunks, one without a prefix, then single queries.

    The prefix fills a chunk of positions and begins another; where there are more heads, the first sees nothing of it.
    """
    heads, rng = prompts.heads, torch.Generator(device).manual_seed(0)

    def rows(n: int, of: int) -> torch.Tensor:
        return torch.randn(n, of, heads.dim, generator=rng, device=device).to(heads.dtype)

    start = device_lists.CHUNK + 9
    first = torch.tensor([0, 0, 2], dtype=torch.int32, device=device)
    lists = empty_lists(first, 2, heads.kv, positions=False)
    counts = torch.arange(heads.kv, device=device) + (heads.kv == 1)
    lists.counts.copy_(torch.stack([2 * counts, counts]))
    lists.cells.random_(0, 32, generator=rng)
    starts, begins, tokens = torch.tensor([[0, start], [0, 3], [3, 5]], device=device)
    group = QueryGroup(starts, starts, starts, starts, begins, tokens, 5, lists)
    q, k, v, k_pool, v_pool = rows(8, heads.query), rows(8, heads.kv), rows(8, heads.kv), rows(32, 1), rows(32, 1)
    pools, expected, out = (k_pool[:, 0], v_pool[:, 0]), torch.empty_like(q), torch.empty_like(q)
    reference.extend(q, k, v, *pools, lists, starts, begins, tokens, heads.scale, 0, None, expected, 5)
    prompts.plan([Piece(0, 0, 3, 0, True, 0), Piece(1, start, start + 5, 3, True, 0)], group)
    prompts.attend(q, k, v, *pools, lists, out)
    yield out, expected
    if singles is not None:
        q, expected, lse = q[:2], expected[:2], torch.empty(2, heads.query, device=device)
        reference.chunked_decode(q, *pools, lists, heads.scale, lse, lse, expected, lse)
        singles.plan([Piece(0, 0, 1, 0, True, 0), Piece(1, start, start + 1, 1, True, 0)], group)
        yield singles.attend(q, *pools, lists), expected
