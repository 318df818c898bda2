"""Packed kept bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvzap_sglang.kernels.bits import pack_bits, unpack_bits


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("columns", [0, 1, 7, 8, 9, 90, 288])
def test_pack_is_numpy_packbits_and_unpack_its_inverse(rows: int, columns: int, rng: torch.Generator) -> None:
    bits = torch.rand(rows, columns, generator=rng) < 0.5
    packed = pack_bits(bits)
    assert packed.dtype == torch.uint8 and packed.is_contiguous()
    assert np.array_equal(packed.numpy(), np.packbits(bits.numpy(), axis=1))
    assert torch.equal(unpack_bits(packed, columns), bits)


def test_packed_rows_slice_like_tokens(rng: torch.Generator) -> None:
    bits = torch.rand(11, 90, generator=rng) < 0.5
    assert torch.equal(unpack_bits(pack_bits(bits)[3:7], 90), bits[3:7])


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="bool"):
        pack_bits(torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"\[n, m\]"):
        pack_bits(torch.zeros(8, dtype=torch.bool))
    with pytest.raises(TypeError, match="uint8"):
        unpack_bits(torch.zeros(2, 1, dtype=torch.int32), 8)
    with pytest.raises(ValueError, match="9 columns"):
        unpack_bits(torch.zeros(2, 1, dtype=torch.uint8), 9)
