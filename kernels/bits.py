"""Packed kept bits of radix-tree nodes: one bit per (token, layer, KV head), in `numpy.packbits` order."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_WEIGHTS = (128, 64, 32, 16, 8, 4, 2, 1)  # the first bit of a byte is its most significant one, as in numpy


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack bool `[n, m]` into uint8 `[n, ceil(m / 8)]`; a last incomplete byte is filled with zeros.

    Raises TypeError if `bits` is not bool, ValueError if it does not have two dimensions.
    """
    if bits.dtype != torch.bool:
        raise TypeError(f"pack_bits takes bool, got {bits.dtype}")
    if bits.dim() != 2:
        raise ValueError(f"pack_bits takes [n, m], got {tuple(bits.shape)}")
    rows, columns = bits.shape
    width = (columns + 7) // 8
    padded = F.pad(bits.to(torch.uint8), (0, width * 8 - columns)).view(rows, width, 8)
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=bits.device)
    return (padded * weights).sum(dim=2, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Inverse of `pack_bits`: uint8 `[n, ceil(columns / 8)]` to bool `[n, columns]`.

    Raises TypeError if `packed` is not uint8, ValueError if its width does not fit `columns`.
    """
    if packed.dtype != torch.uint8:
        raise TypeError(f"unpack_bits takes uint8, got {packed.dtype}")
    if packed.dim() != 2 or packed.shape[1] != (columns + 7) // 8:
        raise ValueError(f"{columns} columns need [n, {(columns + 7) // 8}] bytes, got {tuple(packed.shape)}")
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=packed.device)
    bits = (packed[:, :, None] & weights) != 0
    return bits.view(packed.shape[0], packed.shape[1] * 8)[:, :columns].contiguous()
