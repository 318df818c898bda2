"""Norm and rotary embedding in bf16: C++ and the torch reference, against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvzap_sglang.kernels import cpu, reference
from kvzap_sglang.kernels.cpu import native

ROUNDING = 2**-8  # of a value to bf16, and a little for the fp32 before it


@pytest.fixture(params=["cpu", "reference"])
def kernels(request: pytest.FixtureRequest) -> Any:
    if request.param == "reference":
        return reference
    if native.build.library() is None:
        pytest.skip(f"nothing to test: {native.build.failure()}")
    return cpu


def random_bf16(*shape: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=rng).to(torch.bfloat16)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 300])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 576])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(kernels: Any, rows: int, width: int, with_residual: bool, rng: torch.Generator) -> None:
    x, weight = random_bf16(rows, width, rng=rng), random_bf16(width, rng=rng)
    residual = random_bf16(rows, width, rng=rng) if with_residual else None
    out, total = kernels.rms_norm(x, weight, 1e-5, residual)
    exact = x.double() if residual is None else x.double() + residual.double()
    normed = exact / (exact.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert out.dtype == total.dtype == torch.bfloat16
    torch.testing.assert_close(total.double(), exact, rtol=ROUNDING, atol=0)
    torch.testing.assert_close(out.double(), normed, rtol=ROUNDING, atol=1e-30)


def test_norm_of_zeros_and_of_large_values(kernels: Any) -> None:
    """Nothing is divided by zero, and squares are summed where they fit."""
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[1] = 1e15
    out, _ = kernels.rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 1e-6, None)
    assert (out[0] == 0).all() and (out[1] == 1).all()


@pytest.mark.parametrize("rows", [0, 1, 2, 9, 400])
@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 64), (9, 64), (2, 96), (1, 128)])
def test_rotate(
    kernels: Any, rows: int, heads: int, dim: int, rng: torch.Generator, set_threads: Callable[[int], None]
) -> None:
    set_threads(2)
    wide = random_bf16(rows, heads * dim + 5, rng=rng)
    x = wide[:, 2 : 2 + heads * dim]  # rows of a fused projection lie apart
    positions = torch.randint(0, 50, (rows,), generator=rng)
    angles = torch.rand(50, dim // 2, generator=rng) * 7
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(torch.bfloat16)
    out = kernels.rotate(x, positions, cos_sin)
    cosine, sine = cos_sin[positions].double()[:, None].chunk(2, dim=-1)
    a, b = x.reshape(rows, heads, dim).double().chunk(2, dim=-1)
    exact = torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).view(rows, heads * dim)
    assert out.dtype == torch.bfloat16 and out.is_contiguous()
    torch.testing.assert_close(out.double(), exact, rtol=ROUNDING, atol=1e-5)


@pytest.mark.parametrize("position", [-1, 50])
def test_a_position_without_an_angle_is_named(kernels: Any, position: int) -> None:
    x, cos_sin = torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(50, 8, dtype=torch.bfloat16)
    with pytest.raises(IndexError, match=f"position {position} is outside the rotary cache of 50"):
        kernels.rotate(x, torch.tensor([3, position]), cos_sin)


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x must be a contiguous"):
        cpu.rms_norm(x.float(), weight, 1e-5, None)
    with pytest.raises(ValueError, match="x has 8 columns, weight 7"):
        cpu.rms_norm(x, weight[:7], 1e-5, None)
    with pytest.raises(ValueError, match="residual"):
        cpu.rms_norm(x, weight, 1e-5, x[:1])
    positions, cos_sin = torch.zeros(2, dtype=torch.int64), torch.zeros(5, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x must be bf16"):
        cpu.rotate(x[:, :6], positions, cos_sin)
    with pytest.raises(ValueError, match="1 positions for 2 rows"):
        cpu.rotate(x, positions[:1], cos_sin)
