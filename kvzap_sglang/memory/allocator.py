"""Token slots as SGLang allocates them, with the cells behind them on a ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvzap_sglang.memory.budget import Admissions, KVPressPrefillBudget
from kvzap_sglang.memory.cell_queue import CellQueue
from kvzap_sglang.memory.kept_fraction import KeptFractions
from kvzap_sglang.memory.kv_pool import KVPressPool
from kvzap_sglang.memory.ledger import CellLedger

# Cell-table entries up to which every idle check scans everything (a few ms).
FULL_SCAN_ENTRIES = 4_000_000


class KVPressAllocator(TokenToKVPoolAllocator):
    """Hands out virtual token slots; queues freed ones for the next forward to drain.

    Slots and cells are two meters: every capacity answer to the scheduler is the tighter one.

    Attributes:
        exact: whether this process' own count of free cells may enter scheduling: not where ranks differ.
        nothing_held: tells whether neither a request nor the tree holds a cell.
    """

    exact = True
    nothing_held: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, size: int, dtype: torch.dtype, device: str, kvcache: KVPressPool, need_sort: bool):
        self.cells = kvcache.cells
        self.ledger = CellLedger(self.cells.layout.cells_total)
        self.kept_fractions = KeptFractions()
        self.admissions = Admissions()
        self.queue = CellQueue()
        self._counts: list[Callable[[], list[str]]] = [self.ledger.check]
        self._scans: list[Callable[[], list[str]]] = [self.cells.check]
        self._checked = 0
        super().__init__(size, dtype, device, kvcache, need_sort)

    # -- slots ------------------------------------------------------------------------------

    def free(self, free_index: torch.Tensor) -> None:
        # A deferred free comes through here again when its group ends.
        if self.free_group is None and free_index.numel():
            self.queue.release(free_index)
        super().free(free_index)

    def clear(self) -> None:
        super().clear()
        self.queue.clear()
        self.cells.reset()
        self.ledger.reset()

    def queue_settle(self, slots: torch.Tensor, cells: int) -> None:
        """Settle `slots` (live ones) at the next drain; `cells` of theirs are known to be condemned."""
        self.queue.settle(slots)
        self.ledger.credit(cells)

    def queue_heal(self, slots: torch.Tensor, spares: torch.Tensor) -> None:
        """Heal `slots` with the cells of `spares` at the next drain (`CellPool.heal`)."""
        self.queue.heal(slots, spares)

    def drain(self) -> None:
        """Do what was queued, in order. Forward stream only."""
        self.queue.drain(self.cells)

    def resize(self, config: Any) -> None:
        raise NotImplementedError("kv press: the cell table cannot follow another number of token slots")

    def translate_kv_indices_for_transfer(self, kv_indices: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("kv press: token slots are no rows that a transfer engine could read")

    # -- cells ------------------------------------------------------------------------------

    def available_cells(self) -> int:
        """Cells that the next launch can count on on every rank. A single rank's is exact when nothing is in flight."""
        if self.ledger.idle:
            self.drain()
            if self.exact:
                self.ledger.resync(self.cells.free_cells)
            elif self.nothing_held():
                self.ledger.resync(self.cells.layout.cells_total)
        return self.ledger.available

    def own_free_cells(self) -> int:
        """Free cells of this rank, for reports: exact when nothing is in flight, else what is promised."""
        available = self.available_cells()
        return self.cells.free_cells if self.ledger.idle else available

    def cells_for(self, tokens: int) -> int:
        """Cells of `tokens` dense tokens."""
        return tokens * self.cells.layout.cells_per_token

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> KVPressPrefillBudget:
        return KVPressPrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> None:
        """Free until `num_tokens` fit both meters or nothing is left: dense tails first, then whole leaves,
        both least recently used first."""
        super().evict_to_free_tokens(tree_cache, num_tokens)
        if tree_cache is None or not tree_cache.supports_prefix_sharing():
            return
        need = self.cells_for(num_tokens)
        if self.available_cells() < need:
            tree_cache.settler.reclaim(need - self.available_cells())
        while self.available_cells() < need and tree_cache.evictable_size() > 0:
            # One leaf at a time: how many cells a leaf yields differs from leaf to leaf.
            tree_cache.evict(EvictParams(num_tokens=1))

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache: Any, requests: Any = None, spec_algorithm: Any = None
    ) -> bool:
        fits = super().check_decode_capacity(
            num_tokens=num_tokens, tree_cache=tree_cache, requests=requests, spec_algorithm=spec_algorithm
        )
        return fits and self.available_cells() >= self.cells_for(num_tokens)

    def watch(self, count: Callable[[], list[str]], scan: Callable[[], list[str]]) -> None:
        """Add idle checks (violations, nothing in flight). count: cheap. scan: may read the whole cell table."""
        self._counts.append(count)
        self._scans.append(scan)

    def verify_byte_accounting(self) -> list[str]:
        """Idle check: ledger, cells and tree sets against each other, once after each busy period.

        Large tables are scanned only under SGLang's strict busy checks; all that is counted is always compared.
        """
        self.available_cells()
        if not self.ledger.idle or self._checked == self.ledger.launches:
            return []
        self._checked = self.ledger.launches
        faults = [fault for check in self._counts for fault in check()]
        table = self.cells.table
        if table.numel() > FULL_SCAN_ENTRIES and not envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get():
            live = int((table[:, 1:, :] >= 0).sum())
            free, total = self.cells.free_cells, self.cells.layout.cells_total
            faults += [] if live + free == total else [f"{live} live + {free} free cells != {total}"]
        else:
            faults += [fault for check in self._scans for fault in check()]
        return [f"kv press: {fault}" for fault in faults]
