"""The fused second half of an MLP surrogate: Triton against the torch reference, and both against fp64."""

from __future__ import annotations

import pytest
import torch

from kvzap_sglang.kernels import triton as kernels
from kvzap_sglang.kernels.triton import reference
from kvzap_sglang.kernels.triton.score import ROWS, WIDTH

from .problems import DEVICE
from .test_decode import DTYPES, TOLERANCE


@pytest.mark.parametrize("score", [kernels.mlp_scores, reference.mlp_scores], ids=["triton", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "units"), [(1, 1), (3, WIDTH), (8, 2 * WIDTH + 1), (17, 512)])
@pytest.mark.parametrize("tokens", [0, 1, ROWS - 1, ROWS, ROWS + 1])
def test_scores(score, dtype: torch.dtype, heads: int, units: int, tokens: int, rng: torch.Generator) -> None:
    hidden = torch.randn(tokens, units + 5, generator=rng).to(DEVICE, dtype)[:, :units]
    weight = (torch.randn(heads, units, generator=rng) / units**0.5).to(DEVICE, dtype)
    bias = torch.randn(heads, generator=rng).to(DEVICE, dtype)
    buffer = torch.full((tokens, 2, heads), torch.nan, dtype=dtype, device=DEVICE)
    score(hidden, weight, bias, buffer[:, 1])
    exact = torch.nn.functional.gelu(hidden.double()) @ weight.double().T + bias.double()
    torch.testing.assert_close(buffer[:, 1].double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert buffer[:, 0].isnan().all()
