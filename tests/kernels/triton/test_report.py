"""A step's report: Triton against the torch reference, and both against numpy's packing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvzap_sglang.kernels import triton as kernels
from kvzap_sglang.kernels.counters import COUNTERS, HEADER_BYTES, report_bytes
from kvzap_sglang.kernels.triton import reference
from kvzap_sglang.kernels.triton.report import BYTES

from .problems import DEVICE


@pytest.mark.parametrize("report", [kernels.step_report, reference.step_report], ids=["triton", "reference"])
@pytest.mark.parametrize("pairs", [1, 7, 8, 9, 90, 288])
@pytest.mark.parametrize("tokens", [0, 1, BYTES - 1, BYTES, BYTES + 1])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8])
def test_counters_and_bits(report, pairs: int, tokens: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    kept = (torch.rand(tokens, pairs, generator=rng) < 0.4).to(dtype).to(DEVICE)
    counters = torch.randint(-(2**62), 2**62, (COUNTERS,), generator=rng).to(DEVICE)
    out = torch.full((report_bytes(tokens, pairs) + 3,), 0xA5, dtype=torch.uint8, device=DEVICE)
    report(kept, counters, out[:-3])
    told = out.cpu().numpy()
    assert told[:HEADER_BYTES].view(np.int64).tolist() == counters.tolist()
    assert (told[HEADER_BYTES:-3] == np.packbits(kept.cpu().numpy() != 0, axis=1).ravel()).all()
    assert (told[-3:] == 0xA5).all()
