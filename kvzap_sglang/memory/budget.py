"""Admission with two meters: token slots and cells."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

if TYPE_CHECKING:
    from kvzap_sglang.memory.allocator import KVPressAllocator


@dataclass
class Admissions:
    """What was admitted so far: requests, the dense tokens they may come to, the room they were charged.

    `planned_tokens` below `dense_tokens` is what the estimate of the kept fraction admitted.
    """

    requests: int = 0
    dense_tokens: int = 0
    planned_tokens: float = 0.0


class KVPressPrefillBudget(PrefillBudget):
    """SGLang's slot budget, tightened by what the cells allow.

    A prompt is charged at its dense peak (it is pruned only once its last chunk is done), generated
    tokens at the running kept fraction of the request's class (its threshold), or in full where they are kept.

    Attributes:
        kept: kept fraction that the request under consideration is planned with.
    """

    allocator: KVPressAllocator
    kept = 1.0
    _running_kept = 1.0

    def __init__(self, allocator: KVPressAllocator, tree_cache: Any, *, num_mixed_decode_tokens: int = 0):
        # Slot demand admitted in this pass, and the cells (in dense tokens) it stands for.
        self._admitted_slots = 0.0
        self._admitted_tokens = 0.0
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        if tree_cache.prunes_generated:
            self._running_kept = self._planned(row.threshold for row in tree_cache.rows.values())

    @property
    def window(self) -> int:
        return self.tree_cache.window

    def consider(self, threshold: float) -> None:
        """The request under consideration is one of this threshold."""
        self.kept = self._planned([threshold])

    def _planned(self, thresholds: Iterable[float]) -> float:
        """Kept fraction to plan with for requests of these classes: that of the class which keeps most."""
        estimates = self.allocator.kept_fractions
        return max((estimates.of(threshold).planned for threshold in set(thresholds)), default=1.0)

    def _dense_tokens_available(self) -> float:
        per_token = self.allocator.cells.layout.cells_per_token
        cells = self.allocator.available_cells() + self.tree_cache.evictable_cells
        return cells / per_token

    @property
    def physical_remaining(self) -> float:
        """Dense tokens left in the cells after what running and admitted requests will take."""
        running = max(0.0, self.total_offset - self._admitted_slots)
        future = running * self._running_kept
        return self._dense_tokens_available() - future - self._admitted_tokens

    @property
    def remaining_total(self) -> float:
        return min(super().remaining_total, self.physical_remaining)

    @property
    def remaining_current(self) -> float:
        current = self._dense_tokens_available() - self._admitted_tokens
        return min(super().remaining_current, current)

    def physical_demand(self, extend_tokens: int, new_tokens: float, chunk_limit: int | None) -> float:
        """Dense tokens a request needs at its peak: its dense prompt (sparse: a dense chunk on top of what
        is kept), or in the end what is kept plus a window."""
        kept = self.kept
        whole = extend_tokens + new_tokens
        pruned = whole if self.tree_cache.prunes_generated else extend_tokens
        end = whole - (1.0 - kept) * max(0.0, pruned - self.window)
        peak = float(extend_tokens)
        if self.tree_cache.sparse_prefill and chunk_limit is not None:
            chunk = min(extend_tokens, chunk_limit + self.window)
            peak = chunk + kept * (extend_tokens - chunk)
        return max(peak, end)

    def check_prefill(
        self,
        *,
        extend_input_len: int,
        total_tokens: int,
        max_new_tokens: int,
        input_tokens: int,
        swa_host_hit_length: int,
        chunk_limit: int | None,
        auxiliary_swa_host_hit_length: int = 0,
    ) -> tuple[bool, int | None]:
        if total_tokens >= super().remaining_total:
            return False, None
        demand = self.physical_demand(extend_input_len, total_tokens - extend_input_len, chunk_limit)
        if demand < self.physical_remaining:
            return True, chunk_limit
        if self.total_offset == 0:
            return self._check_alone(extend_input_len, chunk_limit)
        return False, None

    def _check_alone(self, extend_tokens: int, chunk_limit: int | None) -> tuple[bool, int | None]:
        """`check_prefill` while nothing runs: what is short now stays short, so whatever can start must.

        The demand is a guess, and the answer may end early. Should the cells run out after all, the request
        ends with an error; left in the queue, it and all behind it would wait for ever.
        """
        available = int(self._dense_tokens_available())
        if self.tree_cache.sparse_prefill and chunk_limit is not None:
            return (True, min(chunk_limit, available)) if available > 0 else (False, None)
        return (True, chunk_limit) if extend_tokens < available else (False, None)

    def can_allocate_prefill(
        self,
        *,
        paged_input: int,
        extend_input_len: int,
        max_new_tokens: int,
        chunk_limit: int | None,
    ) -> bool:
        return paged_input <= min(self.remaining_current, self.remaining_total)

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """Tokens the next chunk may have; None leaves the request waiting for cells."""
        available = min(chunk_limit, int(self.remaining_current))
        return available if available > 0 else None

    def reserve(
        self,
        extend_input_len: int,
        max_new_tokens: int,
        *,
        extra_tokens: int = 0,
        chunk_limit: int | None = None,
        is_chunked_continuation: bool = False,
    ) -> None:
        before = self.total_offset
        super().reserve(extend_input_len, max_new_tokens, extra_tokens=extra_tokens)
        demand = self.physical_demand(extend_input_len, max_new_tokens, chunk_limit)
        self._admitted_slots += self.total_offset - before
        self._admitted_tokens += demand
        if not is_chunked_continuation:
            self.allocator.admissions.requests += 1
        self.allocator.admissions.dense_tokens += extend_input_len + max_new_tokens
        self.allocator.admissions.planned_tokens += demand
