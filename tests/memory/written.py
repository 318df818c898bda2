"""A simulator that writes into every cell whose token it is, so that a cell read by the wrong token shows."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from kvzap_sglang.kernels.encoding import CELL_MASK
from kvzap_sglang.step_decisions import StepDecisions
from tests.memory.simulator import Request, Simulator


def signature(tokens: list[int], namespace: str | None) -> list[float]:
    """What a cell of the last of `tokens` holds: it names all of the prefix, as K and V rows do."""
    digest = zlib.crc32(repr((tokens, namespace)).encode())
    return [digest & 0xFFFF, digest >> 16, len(tokens), 1.0]


class WrittenSimulator(Simulator):
    """Cells hold their token's signature from the step that computes them on, or from when that token is known."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._launching: list[Request] = []
        self._unwritten: list[tuple[Request, int, int]] = []
        self._end = self.runtime.end
        self.runtime.end = self._write_and_end  # type: ignore[method-assign]

    def finish(self, request: Request) -> None:
        self._write()
        super().finish(request)

    def _launch(self, requests: list[Request], **step: Any) -> None:
        self._launching = requests
        super()._launch(requests, **step)

    def _process(self) -> None:
        super()._process()
        self._write()

    def _write_and_end(self) -> StepDecisions:
        for request, row in zip(self._launching, self.runtime.require_plan().rows, strict=True):
            slots = self.rows.req_to_token[row.row, row.start : row.end].tolist()
            self._unwritten += [(request, slot, row.start + i) for i, slot in enumerate(slots)]
        self._write()
        return self._end()

    def _write(self) -> None:
        """Write what was computed. A step launched before the last one's result computes a token not known yet."""
        live = self._rows()
        waiting = [entry for entry in self._unwritten if entry[0] in live]
        self._unwritten = []
        for request, slot, position in waiting:
            tokens = known_tokens(request)
            if position >= len(tokens):
                self._unwritten.append((request, slot, position))
                continue
            entries = self.pool.table[:, slot]
            cells = (entries[entries >= 0] & CELL_MASK).long()
            self.pool.k[cells] = self.pool.v[cells] = torch.tensor(signature(tokens[: position + 1], request.extra_key))

    def row_slots(self, request: Request) -> torch.Tensor:
        """Token slots of a request's positions, in order."""
        return self.rows.req_to_token[request.kv.req_pool_idx, : request.kv.kv_allocated_len].to(torch.int64)

    def foreign(self) -> list[str]:
        """Positions of running requests and of tree nodes where a cell holds another token's rows."""
        found = []
        for name, slots, tokens, namespace in self._owners():
            expected = torch.tensor([signature(tokens[: i + 1], namespace) for i in range(len(slots))])
            entries = self.pool.table[:, slots]
            rows = (entries.clamp(min=0) & CELL_MASK).long()
            wrong = (self.pool.k[rows] != expected[:, None]).any(-1) | (self.pool.v[rows] != expected[:, None]).any(-1)
            wrong &= entries >= 0
            if wrong.any():
                found.append(f"{name} reads others' rows at {np.flatnonzero(wrong.any(dim=(0, 2)).numpy()).tolist()}")
        return found

    def slots_missing(self) -> int:
        """Token slots that are neither free nor owned by the tree or by a request (SGLang's leak equation)."""
        private = sum(r.kv.kv_allocated_len - r.kv.cache_protected_len for r in self._rows())
        owned = self.tree.evictable_size() + self.tree.protected_size() + private
        return self.allocator.size - self.allocator.available_size() - owned

    def _rows(self) -> list[Request]:
        requests = [*self.running, *([self.chunked] if self.chunked is not None else [])]
        return [request for request in requests if request.kv.req_pool_idx is not None]

    def _owners(self) -> Iterator[tuple[str, torch.Tensor, list[int], str | None]]:
        for request in self._rows():
            tokens = known_tokens(request)
            yield f"request {request.rid}", self.row_slots(request)[: len(tokens)], tokens, request.extra_key
        for node in self.tree.nodes():
            path = self.tree.path(node)
            tokens = [token for part in path for token in part.key.token_ids]
            yield f"node {node.id}", torch.cat([part.value for part in path]), tokens, path[0].key.extra_key


def known_tokens(request: Request) -> list[int]:
    """Prompt and answer; the token that a step in flight is about to sample is not in yet."""
    return [*request.origin_input_ids, *request.output_ids]
