"""The cell pool as SGLang's KV cache object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from kvzap_sglang.memory.cell_pool import CellPool
from kvzap_sglang.memory.layout import CellLayout


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"kv press: {name} takes a token slot for a row of memory, which it is not here")

    return refuse


class KVPressPool(MHATokenToKVPool):
    """`size` token slots over one cell pool that all layers and heads share.

    Class attributes of the subclass that `sized` makes: `physical_tokens`, the room in dense tokens, and `cell_pool`.
    """

    physical_tokens: int = 0
    cell_pool: type[CellPool] = CellPool
    cells: CellPool

    @classmethod
    def sized(cls, physical_tokens: int, cell_pool: type[CellPool] = CellPool) -> type[KVPressPool]:
        """A pool class with this physical capacity and kind of cells: SGLang passes only the slot count."""
        return type(cls.__name__, (cls,), {"physical_tokens": physical_tokens, "cell_pool": cell_pool})

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
        self.cells = self.cell_pool(layout, self.store_dtype, self.device)
        self.k_buffer = [self.cells.k] * self.layer_num
        self.v_buffer = [self.cells.v] * self.layer_num

    def _build_kv_buffer_descs(self) -> list[Any]:
        # Described per layer for transfer engines, which the guard refuses.
        return []

    def get_kv_size_bytes(self) -> tuple[int, int]:
        k, v = self.cells.k, self.cells.v
        return k.numel() * k.element_size(), v.numel() * v.element_size()

    # What writes, copies, moves, describes or lends rows by token slot (a step writes by `Step.write`). The guard
    # refuses the features behind it; reached all the same, it must not touch the cell of another token.
    set_kv_buffer = _refused("set_kv_buffer")
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
