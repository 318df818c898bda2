"""CPU attention backend: C++ ragged decode, torch flash attention for extend."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from kvzap_sglang.attention.metadata import AttentionPlan, ExtendPiece, SingleTokens, attention_plan
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
        self._plan: AttentionPlan | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        plan, rows = self._runtime.require_plan(), self.req_to_token_pool.req_to_token
        self._plan = attention_plan(plan, rows, self._runtime.window)

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
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)
        k, v = self._runtime.step.write(self._index(layer), forward_batch.out_cache_loc, k, v)
        return self._attend(q, k, v, layer).view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def support_triton(self) -> bool:
        return False

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any) -> torch.Tensor:
        """Single tokens of all rows in one go, longer pieces row by row."""
        if self._plan is None:
            raise RuntimeError("kv press: attention without metadata")
        singles, pieces = self._plan
        if singles is not None and not pieces:
            return self._attend_singles(q, singles, layer)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        if singles is not None:
            out[singles.tokens] = self._attend_singles(q[singles.tokens], singles, layer)
        for piece in pieces:
            part = slice(piece.offset, piece.offset + piece.end - piece.start)
            out[part] = self._attend_piece(piece, q[part], k[part], v[part], layer)
        return out

    def _attend_singles(self, q: torch.Tensor, singles: SingleTokens, layer: Any) -> torch.Tensor:
        cells = self._runtime.cells
        visible = visible_cells(cells.table[self._index(layer)], *singles.lists)
        return ragged_decode(q, cells.k, cells.v, visible, layer.scaling)[0]

    def _attend_piece(
        self, piece: ExtendPiece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any
    ) -> torch.Tensor:
        cells, kept, index = self._runtime.cells, self._runtime.step.kept, self._index(layer)
        visible = visible_cells(cells.table[index], *piece.prefix, detail=not piece.dense)
        inputs = (q, k, v, cells.k, cells.v, visible)
        if piece.dense:
            return extend_dense(*inputs, layer.scaling)
        if kept is None:
            raise RuntimeError("kv press: extend attention outside a step")
        own = kept[piece.offset : piece.offset + piece.end - piece.start, index]
        return extend_sparse(*inputs, own, piece.start, self._runtime.window, layer.scaling)

    def _index(self, layer: Any) -> int:
        return layer.layer_id - self.token_to_kv_pool.start_layer
