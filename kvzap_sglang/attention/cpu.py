"""CPU attention backend: C++ ragged decode, torch flash attention for extend."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from kvzap_sglang.attention.metadata import ExtendPiece, PrefixLists, decode_lists, extend_pieces
from kvzap_sglang.kernels.cpu import extend_dense, extend_sparse, ragged_decode, visible_cells
from kvzap_sglang.runtime import KVPressRuntime


class KVPressCPUBackend(AttentionBackend):
    """Attention over per-head visible lists. Metadata is a snapshot: `req_to_token` is not read later."""

    def __init__(self, model_runner: Any, runtime: KVPressRuntime) -> None:
        super().__init__()
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._runtime = runtime
        self._decode: PrefixLists | None = None
        self._pieces: list[ExtendPiece] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        plan = self._runtime.require_plan()
        rows = self.req_to_token_pool.req_to_token
        window = self._runtime.window
        self._decode = decode_lists(plan, rows, window) if plan.is_decode else None
        self._pieces = [] if plan.is_decode else extend_pieces(plan, rows, window)

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
        """Write the new tokens' K and V, then attend; SGLang calls nothing else per layer."""
        if forward_batch.forward_mode.is_idle():
            return super().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if not save_kv_cache:
            raise RuntimeError("kv press: attention without writing KV is not supported")
        self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if forward_batch.forward_mode.is_decode():
            out = self._attend_decode(q, layer)
        else:
            k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            out = self._attend_extend(q, k, v, layer)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def support_triton(self) -> bool:
        return False

    def _attend_decode(self, q: torch.Tensor, layer: Any) -> torch.Tensor:
        if self._decode is None:
            raise RuntimeError("kv press: decode attention without decode metadata")
        cells = self._runtime.cells
        visible = visible_cells(cells.table[self._index(layer)], *self._decode)
        return ragged_decode(q, cells.k, cells.v, visible, layer.scaling)[0]

    def _attend_extend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any) -> torch.Tensor:
        cells, kept, index = self._runtime.cells, self._runtime.kept, self._index(layer)
        if kept is None:
            raise RuntimeError("kv press: extend attention outside a step")
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for piece in self._pieces:
            part = slice(piece.offset, piece.offset + piece.end - piece.start)
            visible = visible_cells(cells.table[index], *piece.prefix, detail=not piece.dense)
            inputs = (q[part], k[part], v[part], cells.k, cells.v, visible)
            if piece.dense:
                out[part] = extend_dense(*inputs, layer.scaling)
            else:
                rule = (kept[part, index], piece.start, self._runtime.window)
                out[part] = extend_sparse(*inputs, *rule, layer.scaling)
        return out

    def _index(self, layer: Any) -> int:
        return layer.layer_id - self.token_to_kv_pool.start_layer
