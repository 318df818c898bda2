"""Attention backend of GPUs: Triton kernels over lists of visible cells, for decode as a recorded graph too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds

from kvzap_sglang.attention.device_lists import (
    CHUNK,
    QueryGroup,
    StepGroups,
    chunks_of,
    empty_lists,
    graph_chunks,
    step_groups,
)
from kvzap_sglang.attention.metadata import Piece, pieces_of
from kvzap_sglang.kernels.triton import chunked_decode, extend, place_chunks, visible_chunks
from kvzap_sglang.runtime import KVPressRuntime


class KVPressTritonBackend(AttentionBackend):
    """Per layer: decide and store the new tokens, list the visible cells, attend. Nothing is read back.

    Eager steps take their queries from the step's plan. A recorded decode step takes lengths and rows from the
    graph's own buffers, and lists from buffers that are made once.
    """

    def __init__(self, model_runner: Any, runtime: KVPressRuntime) -> None:
        super().__init__()
        self.device = torch.device(model_runner.device)
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._context = model_runner.req_to_token_pool.req_to_token.shape[1]
        self._runtime = runtime
        self._groups: StepGroups | None = None
        self._graph: GraphBuffers | None = None

    # -- metadata ---------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Of a step that is not recorded."""
        self._groups = step_groups(self._pieces(forward_batch), self._runtime.cells.layout.heads, self.device)

    def _pieces(self, forward_batch: Any) -> Iterator[Piece]:
        """The planned step's, or nobody's before there is a scheduler that plans."""
        runtime = self._runtime
        return pieces_of(runtime.require_plan(), runtime.window) if runtime.serving else nobodys_pieces(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers of recorded decode steps of up to `max_bs` requests."""
        layout = self._runtime.cells.layout
        self._graph = GraphBuffers(max_bs, graph_chunks(layout, max_bs, self._context), layout.heads, self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Of a recorded decode step: the tensors that `init_forward_metadata_in_graph` fills."""
        if not forward_batch.forward_mode.is_decode():
            self.init_forward_metadata(forward_batch)
        elif self._graph is None:
            raise RuntimeError("kv press: a decode step is recorded without buffers for it")
        else:
            self._groups = StepGroups(self._graph.group(forward_batch), None, None)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Recorded: from the batch's lengths to windows and the places of lists."""
        if self._graph is not None and forward_batch.forward_mode.is_decode():
            self._graph.fill(forward_batch.seq_lens, self._runtime.window)

    def fits_graph(self, forward_batch: Any) -> bool:
        """Whether the lists of a decode batch have room in the recorded step's buffers."""
        return self._graph is None or chunks_of(forward_batch.seq_lens_cpu.tolist()) <= self._graph.chunks

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Every layer reads `req_to_token` when it lists its cells."""
        return SharedReadEnds.POST_REPLAY

    def support_triton(self) -> bool:
        return False

    # -- attention --------------------------------------------------------------------------

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Decide and store the new tokens, then attend; SGLang calls nothing else per layer."""
        if forward_batch.forward_mode.is_idle():
            return super().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if not save_kv_cache:
            raise RuntimeError("kv press: attention without writing KV is not supported")
        if self._groups is None:
            raise RuntimeError("kv press: attention without metadata")
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)
        index = layer.layer_id - self.token_to_kv_pool.start_layer
        k, v = self._runtime.step.write(index, forward_batch.out_cache_loc, k, v)
        singles, dense, sparse = self._groups
        if singles is not None and dense is None and sparse is None and len(singles.rows) == len(q):
            return self._attend_singles(q, singles, index, layer.scaling).flatten(1)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        if singles is not None:
            out[singles.begins] = self._attend_singles(q[singles.begins], singles, index, layer.scaling)
        for group, kept in ((dense, None), (sparse, self._kept(index))):
            if group is not None:
                self._attend_pieces(q, k, v, group, index, layer.scaling, kept, out)
        return out.flatten(1)

    def _attend_singles(self, q: torch.Tensor, group: QueryGroup, layer: int, scale: float) -> torch.Tensor:
        cells = self._runtime.cells
        self._list(group, layer)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        part = q.new_empty((len(group.lists.counts), *q.shape[1:]), dtype=torch.float32)
        part_lse, lse = (q.new_empty((n, q.shape[1]), dtype=torch.float32) for n in (len(part), len(q)))
        chunked_decode(q, cells.k, cells.v, group.lists, scale, part, part_lse, out, lse)
        return out

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
        cells, window = self._runtime.cells, self._runtime.window
        self._list(group, layer)
        bounds = (group.starts, group.begins, group.tokens)
        extend(q, k, v, cells.k, cells.v, group.lists, *bounds, scale, window, kept, out, group.longest)

    def _list(self, group: QueryGroup, layer: int) -> None:
        table, rows = self._runtime.cells.table[layer], self.req_to_token_pool.req_to_token
        visible_chunks(table, rows, group.rows, group.lengths, group.dense_from, group.lists)

    def _kept(self, layer: int) -> torch.Tensor | None:
        kept = self._runtime.step.kept
        return None if kept is None else kept[:, layer]


class GraphBuffers:
    """What a recorded decode step reads and fills, for any batch up to the largest.

    Attributes:
        chunks: lists that fit.
    """

    def __init__(self, max_bs: int, chunks: int, heads: int, device: torch.device) -> None:
        self.chunks = chunks
        first = torch.zeros(max_bs + 1, dtype=torch.int32, device=device)
        self._lists = empty_lists(first, chunks, heads, positions=False)
        self._dense_from = torch.zeros(max_bs, dtype=torch.int64, device=device)
        self._index = torch.arange(max_bs, device=device)

    def group(self, forward_batch: Any) -> QueryGroup:
        """The batch's queries, in the graph's own `req_pool_indices` and `seq_lens`."""
        n = forward_batch.batch_size
        lists = self._lists._replace(first=self._lists.first[: n + 1])
        rows, lengths = forward_batch.req_pool_indices[:n], forward_batch.seq_lens[:n]
        index = self._index[:n]
        return QueryGroup(rows, lengths, self._dense_from[:n], index, index, index, 1, lists)

    def fill(self, lengths: torch.Tensor, window: int) -> None:
        """Windows and places of lists of a batch; recorded."""
        n = len(lengths)
        place_chunks(lengths, CHUNK, window, self._lists.first[: n + 1], self._dense_from[:n])


def nobodys_pieces(forward_batch: Any) -> Iterator[Piece]:
    """Queries of a forward that warms up or is recorded: row 0, whose tokens all lie in the sink."""
    if forward_batch.forward_mode.is_decode():
        for index, length in enumerate(forward_batch.seq_lens_cpu.tolist()):
            yield Piece(0, length - 1, length, index, dense=False, dense_from=0)
        return
    token = 0
    bounds = zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True)
    for start, length in bounds:
        yield Piece(0, int(start), int(start) + int(length), token, dense=True, dense_from=0)
        token += int(length)
