"""A scheduler and a device without a model: real allocator, tree, planner and cells under any order of events."""

from __future__ import annotations

import copy
import random
from array import array
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvzap_sglang.config import KVPressConfig
from kvzap_sglang.device_step import DeviceStep
from kvzap_sglang.host_step import HostStep
from kvzap_sglang.memory.allocator import KVPressAllocator
from kvzap_sglang.memory.cell_pool import CellPool
from kvzap_sglang.memory.device_cell_pool import DeviceCellPool
from kvzap_sglang.memory.head_token_sets import SetShape
from kvzap_sglang.memory.layout import CellLayout
from kvzap_sglang.presses.base import LayerInput
from kvzap_sglang.radix_cache import KVPressRadixCache
from kvzap_sglang.ranks import GatherReports, own_report
from kvzap_sglang.request_options import cache_namespace
from kvzap_sglang.runtime import KVPressRuntime
from kvzap_sglang.sharing.checks import count_faults, scan_faults
from kvzap_sglang.sharing.turns import waits_for_its_branch
from kvzap_sglang.step_decisions import StepDecisions
from kvzap_sglang.step_plan import StepPlan

LAYERS, HEADS = 2, 3
CONFIG = KVPressConfig(kv_press="kvzap", kv_press_threshold=0.0)


class CoinPress:
    """Condemns a fraction of pairs, differently every time it is asked."""

    digest = "coin"

    def __init__(self, removed: float, coins: torch.Generator) -> None:
        self.removed = removed
        self._coins = coins

    def score(self, layer: int, inputs: LayerInput) -> torch.Tensor:
        return torch.rand(len(inputs.positions), HEADS, generator=self._coins) - self.removed


class RowPool:
    """`req_to_token` and its `write`."""

    def __init__(self, rows: int, context: int) -> None:
        self.req_to_token = torch.zeros(rows + 1, context, dtype=torch.int32)
        self.free = list(range(1, rows + 1))

    def write(self, where: Any, values: torch.Tensor) -> None:
        self.req_to_token[where] = values.to(torch.int32)


class Request:
    """The attributes of SGLang's `Req` that tree and planner read."""

    def __init__(self, rid: int, prompt: list[int], max_new: int, threshold: Any = None) -> None:
        self.rid, self.max_new = str(rid), max_new
        self.origin_input_ids = array("q", prompt)
        self.output_ids: list[int] = []
        self.full_untruncated_fill_ids = array("q", prompt)
        self.kv = ReqKvInfo()
        self.cache_salt = None
        self.priority = 0
        self.prefix_len = self.extend_end = 0
        self.last_node: Any = None
        self.lock: Any = None
        self.sampling_params = SimpleNamespace(custom_params=None if threshold is None else {"kv_press": threshold})
        self.extra_key = cache_namespace(None, self.sampling_params.custom_params, CONFIG)
        self.done = False

    def finished(self) -> bool:
        return self.done

    def owned_kv_len(self) -> int:
        return self.kv.kv_committed_len


class Simulator:
    """Launches steps and processes their results `lag` steps later, as overlap scheduling does.

    `tokens` is where sampled tokens come from; every rank of one model must be given the same. `attention` is
    called where a step's attention would read the cells.
    """

    def __init__(
        self,
        *,
        physical: int,
        headroom: int,
        window: int,
        lag: int,
        removed: float,
        sparse: bool,
        recompute: bool = True,
        keep_generated: bool = False,
        seed: int | None = None,
        tokens: random.Random | None = None,
        pool: type[CellPool] = CellPool,
        ranks: int = 1,
        rank: int = 0,
        gather: GatherReports = own_report,
    ) -> None:
        layout = CellLayout(LAYERS, HEADS, 4, 4, 4, physical, physical * headroom)
        self.pool = pool(layout, torch.float32, "cpu")
        self._tokens = tokens or random.Random(random.random())
        coins = torch.Generator().manual_seed(self._tokens.randrange(2**31) if seed is None else seed)
        cache = SimpleNamespace(cells=self.pool)
        self.allocator = KVPressAllocator(physical * headroom, torch.float32, "cpu", cache, False)  # type: ignore[arg-type]
        self.rows = RowPool(8, 512)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
        )
        config = CONFIG.model_copy(
            update={
                "kv_press_window": window,
                "kv_press_prefill": "sparse" if sparse else "dense",
                "kv_press_hit_window": "recompute" if recompute else "accept",
                "kv_press_decode": "keep" if keep_generated else "prune",
            }
        )
        self.tree = KVPressRadixCache(params, config, SetShape(layout.cells_per_token, ranks, rank), LAYERS)
        self.runtime = KVPressRuntime(
            self._step(CoinPress(removed, coins)),
            self.allocator,
            self.rows.req_to_token,
            config,
            result_lag=lag,
            gather=gather,
        )
        self.runtime.attach_tree(self.tree)
        self.lag = lag
        self.window = window
        self.sparse = sparse
        self.results: deque[tuple[StepDecisions, Any]] = deque()
        self.attention: Callable[[StepPlan], None] = lambda plan: None
        self.chunked: Request | None = None
        self.running: list[Request] = []

    # -- events -----------------------------------------------------------------------------

    def admit(self, request: Request) -> bool:
        """Match and lock, if the dense prompt fits the cells and nobody computes what it would recompute."""
        if self.chunked is not None or not self.rows.free:
            return False
        tokens = array("q", list(request.origin_input_ids) + request.output_ids)
        request.full_untruncated_fill_ids = tokens
        key = RadixKey(tokens, request.extra_key, limit=len(tokens) - 1)
        match = self.tree.match_prefix(MatchPrefixParams(key=key, req=request))  # type: ignore[arg-type]
        request.prefix_len = request.kv.cache_protected_len = match.device_prefix_len
        request.last_node = match.last_device_node
        if waits_for_its_branch(self.tree, request, []):
            return False
        extend = len(tokens) - request.prefix_len
        prefix = self.tree.path_cells(request.last_node)
        if self.allocator.cells_for(extend + request.max_new + 1) > self.pool.layout.cells_total - prefix:
            return False
        request.lock = self.tree.lock(request.last_node)
        self.chunked = request
        return True

    def prefill_chunk(self, size: int) -> bool:
        """Launch the next chunk of the prompt being prefilled; False when there are no cells for it."""
        request = self.chunked
        if request is None:
            return False
        if request.extend_end > request.prefix_len:  # stash: publish the previous chunk
            self.tree.checkpoint(request, up_to=request.extend_end)
            request.prefix_len = request.extend_end
        total = len(request.full_untruncated_fill_ids)
        size = min(size, total - request.prefix_len)
        slots = self._allocate(size)
        if slots is None:
            return False
        if request.kv.req_pool_idx is None:
            request.kv.req_pool_idx = self.rows.free.pop()
            prefix = self.tree.path_device_indices(request.last_node)[: request.prefix_len]
            self.rows.write((request.kv.req_pool_idx, slice(0, request.prefix_len)), prefix)
        start, end = request.prefix_len, request.prefix_len + size
        self.rows.write((request.kv.req_pool_idx, slice(start, end)), slots)
        request.extend_end = request.kv.kv_committed_len = request.kv.kv_allocated_len = end
        if end == total:
            self.chunked = None
            self.running.append(request)
        self._launch([request], decode=False, samples=end == total, slots=slots, prefix=[start], extend=[size])
        return True

    def decode(self) -> bool:
        """One token for every running request whose prefill result was processed."""
        ready = [r for r in self.running if r.output_ids and not r.done]
        slots = self._allocate(len(ready)) if ready else None
        if slots is None:
            return False
        for request, slot in zip(ready, slots, strict=True):
            position = request.kv.kv_allocated_len
            self.rows.write((request.kv.req_pool_idx, position), slot)
            request.kv.kv_committed_len = request.kv.kv_allocated_len = position + 1
        self._launch(ready, decode=True, samples=True, slots=slots, lengths=[r.kv.kv_allocated_len for r in ready])
        return True

    def finish(self, request: Request) -> None:
        """Release into the tree all positions whose tokens are known."""
        request.done = True
        known = len(request.origin_input_ids) + len(request.output_ids) - 1
        self._release(request, checkpoint=True, owned=min(known, request.kv.kv_committed_len))

    def retract(self, request: Request) -> Request:
        """Release without checkpoint; the request that resumes."""
        self._release(request, checkpoint=False, owned=request.kv.kv_committed_len)
        threshold = (request.sampling_params.custom_params or {}).get("kv_press")
        again = Request(int(request.rid), list(request.origin_input_ids), request.max_new, threshold)
        again.output_ids = list(request.output_ids)
        return again

    def abort_chunked(self) -> None:
        request, self.chunked = self.chunked, None
        if request is not None and request.kv.req_pool_idx is not None:
            self._release(request, checkpoint=False, owned=request.kv.kv_committed_len)
        elif request is not None:
            self.tree.unlock(request.lock)

    def evict(self, tokens: int) -> None:
        self.tree.evict(EvictParams(num_tokens=tokens))

    def reclaim(self, cells: int) -> None:
        self.tree.settler.reclaim(cells)

    def flush(self) -> bool:
        """Forget everything, if nothing runs (SGLang's `flush_cache`)."""
        if self.running or self.chunked is not None or self.results:
            return False
        self.tree.reset()
        self.allocator.clear()
        return True

    def settle_results(self) -> None:
        """Process every outstanding result."""
        while self.results:
            self._process()

    def check(self) -> list[str]:
        """Everything that must hold; the sets only when nothing is in flight."""
        faults = self.pool.check()
        truth = self.pool.free_cells + self._queued_cells()
        if self.allocator.ledger.available > truth:
            faults.append(f"ledger promises {self.allocator.ledger.available} of {truth}")
        if not self.results:
            self.allocator.available_cells()  # drains: the sets describe what is left then
            faults += scan_faults(self.tree)
            faults += [] if self.unlaunched else count_faults(self.tree)
        return faults

    @property
    def unlaunched(self) -> bool:
        """A request holds a lock and no row yet: a server is not idle then."""
        return self.chunked is not None and self.chunked.kv.req_pool_idx is None

    def _queued_cells(self) -> int:
        """Cells that the next drain will free."""
        pool, queue = copy.deepcopy((self.pool, self.allocator.queue))
        queue.drain(pool)
        return pool.free_cells - self.pool.free_cells

    def _step(self, press: CoinPress) -> HostStep | DeviceStep:
        if isinstance(self.pool, DeviceCellPool):
            return DeviceStep(press, self.pool, CONFIG.sinks, 64, torch.float32)
        return HostStep(press, self.pool, CONFIG.sinks)

    def _store(self, layer: int, slots: torch.Tensor) -> None:
        """On a device decisions are made by what stores keys and values. These are zeros."""
        if isinstance(self.runtime.step, DeviceStep):
            rows = self.pool.k.new_zeros(len(slots), HEADS, self.pool.k.shape[1])
            self.runtime.step.write(layer, slots, rows, rows)

    # -- internals --------------------------------------------------------------------------

    def _allocate(self, tokens: int) -> torch.Tensor | None:
        self.allocator.evict_to_free_tokens(self.tree, tokens)
        if self.allocator.available_cells() < self.allocator.cells_for(tokens):
            return None
        return self.allocator.alloc(tokens)

    def _launch(
        self, requests: list[Request], *, decode: bool, samples: bool, slots: torch.Tensor, **shape: Any
    ) -> None:
        batch = SimpleNamespace(
            reqs=requests,
            forward_mode=SimpleNamespace(is_decode=lambda: decode),
            seq_lens_cpu=torch.tensor(shape.get("lengths", [])),
            prefix_lens=shape.get("prefix"),
            extend_lens=shape.get("extend"),
        )
        plan = self.runtime.launch(batch)
        self.runtime.begin(slots)
        positions = torch.cat([torch.arange(row.start, row.end) for row in plan.rows])
        for layer in range(LAYERS):
            self.runtime.step.score(layer, LayerInput(positions, positions, positions))
            self._store(layer, slots)
        self.attention(plan)
        self.runtime.end()
        self.results.append((self.runtime.take_decisions(), (decode, samples, list(requests))))
        while len(self.results) > self.lag:
            self._process()

    def _process(self) -> None:
        decisions, (decode, samples, requests) = self.results.popleft()
        self.runtime.apply(decisions)
        self.allocator.free_group_begin()
        for request in requests:
            if request.done or request.kv.req_pool_idx is None:
                continue
            if decode:
                request.output_ids.append(self._tokens.randrange(4))
                if len(request.output_ids) >= request.max_new:
                    self.finish(request)
            elif samples:
                request.output_ids.append(self._tokens.randrange(4))
                if request.max_new <= len(request.output_ids):
                    self.finish(request)
                else:
                    self.tree.checkpoint(request, up_to=request.extend_end)
        self.allocator.free_group_end()

    def _release(self, request: Request, *, checkpoint: bool, owned: int) -> None:
        kv = request.kv
        if checkpoint:
            request.full_untruncated_fill_ids = array("q", list(request.origin_input_ids) + request.output_ids)
            self.tree.checkpoint(request, up_to=owned)
        self.tree.free_kv_row(kv, [(kv.cache_protected_len, owned)])
        self.tree.unlock(request.lock)
        if owned < kv.kv_allocated_len:
            self.tree.free_kv_row(kv, [(owned, kv.kv_allocated_len)])
        self.tree.on_release(request, checkpointed=checkpoint)  # type: ignore[arg-type]
        self.rows.free.append(kv.req_pool_idx)  # type: ignore[arg-type]
        kv.req_pool_idx = None
        if request in self.running:
            self.running.remove(request)
