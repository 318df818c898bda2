"""The C++ kernels behind torch signatures, or their plain torch references where nothing can be compiled."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import Any

import torch

from .. import reference
from ..encoding import VisibleCells
from . import build

_ISA_LEVELS = {"generic": 0, "avx2": 1, "avx512": 2}
_I32, _I64, _F32, _PTR = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_DTYPES = (torch.float32, torch.bfloat16)


@lru_cache(maxsize=1)
def isa_level() -> int:
    """Instruction set in use: 0 generic, 1 AVX2, 2 AVX-512; the host's best unless `KVZAP_CPU_ISA` names a lower one.

    Raises ValueError if that variable is unknown or names one that this host lacks, RuntimeError without a library.
    """
    library = build.library()
    if library is None:
        raise RuntimeError("the CPU kernels are not compiled; there is no instruction set to choose")
    best = int(library.kvzap_best_isa())
    wanted = os.environ.get("KVZAP_CPU_ISA")
    if not wanted:
        return best
    if wanted not in _ISA_LEVELS or _ISA_LEVELS[wanted] > best:
        usable = [name for name, level in _ISA_LEVELS.items() if level <= best]
        raise ValueError(f"KVZAP_CPU_ISA={wanted}: this host has {', '.join(usable)}")
    return _ISA_LEVELS[wanted]


def describe() -> str:
    """One line for people: which kernels attention runs on here, and with what. Builds them if that is still to do."""
    library = build.library()
    if library is None:
        return f"plain torch, several times slower than the C++ kernels: {build.failure()}"
    isa = next(name for name, level in _ISA_LEVELS.items() if level == isa_level())
    return f"C++ kernels, {isa}, {torch.get_num_threads()} threads, OpenMP from {build.loaded_openmp() or 'the system'}"


@lru_cache(maxsize=1)
def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the C signatures once: without them ctypes would cut pointers to 32 bits."""
    pools = [_PTR, _PTR, _I64, _I64]  # K, V and their row strides
    rows = [_PTR, _I64, _I64]  # new K or V, its strides by token and by head
    declared = {
        "kvzap_visible_cells": [_PTR, _I64, _I64, _PTR, _PTR, _I64, _PTR, _PTR, _PTR, _PTR, _PTR, _I32],
        "kvzap_ragged_decode": [_I32, _I32, _PTR, *pools, _I64, _PTR, _PTR, _I64, _I32, _I32, _F32, _PTR, _PTR, _I32],
        "kvzap_write_cells": [_PTR, _I64, _I64, _PTR, _I64, *rows, *rows, _PTR, _I64, _PTR, _I64, _I64, _I64, _I32],
        "kvzap_rms_norm": [_PTR, _PTR, _PTR, _F32, _PTR, _PTR, _I64, _I64, _I32],
        "kvzap_rotate": [_PTR, _I64, _PTR, _PTR, _I64, _PTR, _I64, _I64, _I64, _I32],
        "kvzap_linear": [_I32, _PTR, _PTR, _PTR, _PTR, _I64, _I64, _I64, _I32],
        "kvzap_read_rows": [_I32, _I32, *pools, _PTR, _PTR, _I64, _I32, _I32],
    }
    results: dict[str, Any] = {"kvzap_read_rows": _F32, "kvzap_linear": None, "kvzap_rms_norm": None}
    for name, arguments in declared.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = results.get(name, _I64)
    return library


def need(tensor: torch.Tensor, name: str, dtype: torch.dtype, dims: int) -> None:
    """Raise ValueError, naming the argument, unless C++ can read it."""
    if tensor.dtype != dtype or tensor.dim() != dims or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be a contiguous {dtype} CPU tensor of {dims} dimensions, got {tensor.dtype} "
            f"{tuple(tensor.shape)} strides {tensor.stride()} on {tensor.device}"
        )


def _check_pools(k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if pool.dim() != 2 or pool.stride(1) != 1 or pool.device.type != "cpu":
            raise ValueError(f"{name} must be [N, D] on the CPU with dense rows, got {tuple(pool.shape)}")
        if pool.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float32 or bfloat16, got {pool.dtype}")
    if k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        raise ValueError(f"pools differ: {k_pool.dtype} {k_pool.shape}, {v_pool.dtype} {v_pool.shape}")


def _check_slot_lists(table: torch.Tensor, slots: torch.Tensor) -> None:
    need(table, "table", torch.int32, 2)
    need(slots, "slots", torch.int64, 1)


def _check_visible(visible: VisibleCells) -> None:
    need(visible.indptr, "visible.indptr", torch.int64, 1)
    need(visible.cells, "visible.cells", torch.int32, 1)
    if int(visible.indptr[-1]) > visible.cells.numel():
        raise ValueError(f"indptr ends at {int(visible.indptr[-1])} of {visible.cells.numel()} cells")


def visible_cells(
    table: torch.Tensor,
    slots: torch.Tensor,
    slot_indptr: torch.Tensor,
    dense_from: torch.Tensor,
    detail: bool = False,
) -> VisibleCells:
    """See `reference.visible_cells`. Also raises ValueError for arguments that are not contiguous or of another dtype."""
    _check_slot_lists(table, slots)
    need(slot_indptr, "slot_indptr", torch.int64, 1)
    need(dense_from, "dense_from", torch.int64, 1)
    requests, heads = slot_indptr.numel() - 1, table.shape[1]
    if dense_from.numel() != requests or int(slot_indptr[-1]) != slots.numel():
        raise ValueError(f"{slot_indptr.tolist()} does not cut {slots.numel()} slots for {dense_from.numel()} requests")
    library = build.library()
    if library is None:
        return reference.visible_cells(table, slots, slot_indptr, dense_from, detail)
    room = slots.numel() * heads
    indptr = torch.zeros(requests * heads + 1, dtype=torch.int64)
    cells = torch.empty(room, dtype=torch.int32)
    positions = torch.empty(room, dtype=torch.int32) if detail else None
    condemned = torch.empty(room, dtype=torch.uint8) if detail else None
    found: int = declare(library).kvzap_visible_cells(
        table.data_ptr(), table.shape[0], heads, slots.data_ptr(), slot_indptr.data_ptr(), requests,
        dense_from.data_ptr(), indptr.data_ptr(), cells.data_ptr(),
        None if positions is None else positions.data_ptr(),
        None if condemned is None else condemned.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if found < 0:
        reference.check_slots(slots[-1 - found :], table.shape[0])
    if positions is None or condemned is None:
        return VisibleCells(indptr, cells[:found])
    return VisibleCells(indptr, cells[:found], positions[:found], condemned[:found])


def ragged_decode(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, visible: VisibleCells, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.ragged_decode`. Head dimensions are multiples of 16; any group size."""
    _check_pools(k_pool, v_pool)
    _check_visible(visible)
    if q.dtype != k_pool.dtype:
        raise TypeError(f"q is {q.dtype}, the pools are {k_pool.dtype}")
    batch, q_heads, dim = q.shape
    segments = visible.indptr.numel() - 1
    if dim != k_pool.shape[1] or dim % 16 != 0:
        raise ValueError(f"head dimension {dim} must be a multiple of 16 and the pools' ({k_pool.shape[1]})")
    if (batch * q_heads) % max(segments, 1) != 0 or (segments % max(batch, 1)) != 0:
        raise ValueError(f"{segments} segments do not fit {batch} requests of {q_heads} query heads")
    library = build.library()
    if library is None:
        return reference.ragged_decode(q, k_pool, v_pool, visible, scale)
    q = q.contiguous()
    out = torch.empty_like(q)
    lse = torch.empty(batch, q_heads, dtype=torch.float32)
    if segments == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    bad: int = declare(library).kvzap_ragged_decode(
        isa_level(), q.dtype == torch.bfloat16, q.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(),
        k_pool.stride(0), v_pool.stride(0), k_pool.shape[0], visible.indptr.data_ptr(), visible.cells.data_ptr(),
        segments, batch * q_heads // segments, dim, scale, out.data_ptr(), lse.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if bad:
        raise IndexError(f"cell {int(visible.cells[bad - 1])} is outside the pool of {k_pool.shape[0]} rows")
    return out, lse


def write_cells(
    table: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> None:
    """See `reference.write_cells`. Also raises ValueError for shapes that do not fit."""
    _check_pools(k_pool, v_pool)
    _check_slot_lists(table, slots)
    expected = (slots.numel(), table.shape[1], k_pool.shape[1])
    if tuple(k.shape) != expected or tuple(v.shape) != expected:
        raise ValueError(f"k and v must be {expected}, got {tuple(k.shape)} and {tuple(v.shape)}")
    library = build.library()
    if library is None:
        return reference.write_cells(table, slots, k, v, k_pool, v_pool)
    k, v = (x.to(k_pool.dtype) for x in (k, v))
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    size = k_pool.element_size()
    bad: int = declare(library).kvzap_write_cells(
        table.data_ptr(), table.shape[0], table.shape[1], slots.data_ptr(), slots.numel(),
        k.data_ptr(), k.stride(0) * size, k.stride(1) * size, v.data_ptr(), v.stride(0) * size, v.stride(1) * size,
        k_pool.data_ptr(), k_pool.stride(0) * size, v_pool.data_ptr(), v_pool.stride(0) * size, k_pool.shape[0],
        k_pool.shape[1] * size, torch.get_num_threads(),
    )  # fmt: skip
    if bad:
        token, head = divmod(bad - 1, table.shape[1])
        slot = int(slots[token])
        reference.check_slots(slots[token : token + 1], table.shape[0])
        raise RuntimeError(reference.no_cell_message(slot, head, int(table[slot, head]), k_pool.shape[0]))


def read_rows(k_pool: torch.Tensor, v_pool: torch.Tensor, visible: VisibleCells) -> float:
    """Read the K and V rows that `ragged_decode` would read, and only add them up: the bound for benchmarks.

    Raises RuntimeError where the kernels are not compiled.
    """
    _check_pools(k_pool, v_pool)
    _check_visible(visible)
    library, level = build.library(), isa_level()
    if library is None:
        raise RuntimeError("the CPU kernels are not compiled")
    return float(
        declare(library).kvzap_read_rows(
            level, k_pool.dtype == torch.bfloat16, k_pool.data_ptr(), v_pool.data_ptr(), k_pool.stride(0),
            v_pool.stride(0), visible.indptr.data_ptr(), visible.cells.data_ptr(), visible.indptr.numel() - 1,
            k_pool.shape[1], torch.get_num_threads(),
        )
    )  # fmt: skip
