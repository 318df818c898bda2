"""Pure-torch stand-in for SGLang's kernel package `sgl_kernel`, for machines without a GPU.

SGLang 0.5.23 imports the names below at module level when it serves on a CPU, and PyPI has no CPU build of the real one.
It declares no `torch.ops.sgl_kernel` operator, so SGLang sees no AMX kernels and takes its pure-torch paths.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.0.0+cpu"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """`req_to_token[r, start:end] = the next (end - start) entries of out_cache_loc`, for every request in order.

    req_pool_indices, start_offset, end_offset: int [B]; req_to_token: int32 [requests, pool_len], changed in place;
    out_cache_loc: int [sum(end - start)]. Raises ValueError when the lengths do not add up or pass pool_len.
    Caller: sglang/srt/mem_cache/allocation.py, assign_req_to_token_pool_func.
    """
    offset = 0
    for request, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = end - start
        if count < 0 or end > pool_len or offset + count > out_cache_loc.numel():
            raise ValueError(f"request {request}: cannot place slots {start}:{end} (pool_len {pool_len})")
        req_to_token[request, start:end] = out_cache_loc[offset : offset + count].to(req_to_token.dtype)
        offset += count


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy rows src_loc to rows tgt_loc in every buffer; all sources are read before any target is written.

    data_ptrs: uint64 [buffers], addresses; strides: int [buffers], bytes per row; tgt_loc, src_loc: int [rows].
    Caller: sglang/kernels/ops/kvcache/cache_move.py, copy_all_layer_kv_cache_func.
    """
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + row * stride, stride) for row in sources]
        for row, content in zip(targets, rows, strict=True):
            ctypes.memmove(pointer + row * stride, content, stride)


def _needs_real_kernel(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name}: speculative decoding needs the real sgl_kernel; kvzap-sglang-cpu only stands in for it. "
            "Leave out the --speculative-* flags on a CPU."
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


rotate_input_ids_cpu = _needs_real_kernel("rotate_input_ids_cpu")
fill_accept_out_cache_loc_cpu = _needs_real_kernel("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _needs_real_kernel("fill_bonus_tokens_cpu")
assign_draft_cache_locs_contiguous_cpu = _needs_real_kernel("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _needs_real_kernel("assign_extend_cache_locs_cpu")
build_tree_kernel_efficient_cpu = _needs_real_kernel("build_tree_kernel_efficient_cpu")
verify_tree_greedy_cpu = _needs_real_kernel("verify_tree_greedy_cpu")
