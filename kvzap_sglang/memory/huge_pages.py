"""Memory of CPU tensors in huge pages, where the kernel gives them on request (Linux, `madvise`).

Rows of a pruned cache lie anywhere in a pool of hundreds of megabytes: with 4 KiB pages looking their addresses up costs
part of the time of reading them.
"""

from __future__ import annotations

import ctypes
import sys

import torch

HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


def empty_in_huge_pages(*shape: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """`torch.empty`, advised to lie in huge pages on a CPU. Advice: where it is not taken, ordinary memory."""
    tensor = torch.empty(*shape, dtype=dtype, device=device)
    if tensor.device.type == "cpu":
        advise(tensor)
    return tensor


def advise(tensor: torch.Tensor) -> bool:
    """Ask for huge pages before the tensor is first touched. Whether the kernel took the advice."""
    start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // HUGE_PAGE * HUGE_PAGE
    if not sys.platform.startswith("linux") or start >= end:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)) == 0
