"""The cell pool as SGLang's KV cache object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc

from kvzap_sglang.kernels.cpu import write_cells
from kvzap_sglang.memory.cell_pool import CellPool
from kvzap_sglang.memory.layout import CellLayout


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"kv press: {name} takes a token slot for a row of memory, which it is not here")

    return refuse


class KVPressPool(MHATokenToKVPool):
    """`size` token slots over one cell pool that all layers and heads share.

    `physical_tokens` (class attribute of the subclass `sized` makes) is the room in dense tokens.
    """

    physical_tokens: int = 0
    cells: CellPool

    @classmethod
    def sized(cls, physical_tokens: int) -> type[KVPressPool]:
        """A pool class with this physical capacity: SGLang passes only the slot count."""
        return type(cls.__name__, (cls,), {"physical_tokens": physical_tokens})

    def _create_buffers_normal(self) -> None:
        layout = CellLayout(
            layers=self.layer_num,
            heads=self.head_num,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            itemsize=self.store_dtype.itemsize,
            physical_tokens=self.physical_tokens,
            virtual_tokens=self.size,
        )
        self.cells = CellPool(layout, self.store_dtype, self.device)
        self.k_buffer = [self.cells.k] * self.layer_num
        self.v_buffer = [self.cells.v] * self.layer_num

    def _build_kv_buffer_descs(self) -> list[Any]:
        # Described per layer for transfer engines, which the guard refuses.
        return []

    def get_kv_size_bytes(self) -> tuple[int, int]:
        k, v = self.cells.k, self.cells.v
        return k.numel() * k.element_size(), v.numel() * v.element_size()

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Write K and V (`[n, heads, dim]`) of token slots through the cell table."""
        if args or any(value is not None for value in kwargs.values()):
            raise NotImplementedError("kv press: scaled, overridden or masked KV writes are not supported")
        slots, _, _ = unwrap_write_loc(loc_info)
        write_cells(
            self.cells.table[layer.layer_id - self.start_layer],
            slots.to(torch.int64),
            cache_k.view(-1, self.head_num, self.head_dim).to(self.store_dtype),
            cache_v.view(-1, self.head_num, self.v_head_dim).to(self.store_dtype),
            self.cells.k,
            self.cells.v,
        )

    # What copies, moves, describes or lends rows by token slot. The guard refuses the features behind it; reached all
    # the same, it must not read or write the cell of another token.
    get_key_buffer = _refused("get_key_buffer")
    get_value_buffer = _refused("get_value_buffer")
    get_kv_buffer = _refused("get_kv_buffer")
    get_kv_buffer_shape = _refused("get_kv_buffer_shape")
    get_raw_kv_buffer = _refused("get_raw_kv_buffer")
    set_kv_buffer_prefix_valid = _refused("set_kv_buffer_prefix_valid")
    move_kv_cache = _refused("move_kv_cache")
    get_cpu_copy = _refused("get_cpu_copy")
    load_cpu_copy = _refused("load_cpu_copy")
    get_contiguous_buf_infos = _refused("get_contiguous_buf_infos")
    get_device_pool_infos = _refused("get_device_pool_infos")
    host_pool_decls = _refused("host_pool_decls")
    finalize_backing = _refused("finalize_backing")
