"""The bf16 linear layer: C++ at every instruction set of this host, and the torch reference, against fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvzap_sglang.kernels import reference
from kvzap_sglang.kernels.cpu import linear
from kvzap_sglang.kernels.cpu.linear import FEW_ROWS

from .conftest import LEVELS

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@pytest.fixture(params=[*LEVELS, "reference"])
def product(request: pytest.FixtureRequest, need_isa: Callable[[str], None]) -> Linear:
    """`linear` at one instruction set, or its reference."""
    if request.param == "reference":
        return reference.linear
    need_isa(request.param)
    return linear


def random_layer(rows: int, outputs: int, width: int, rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    shapes = ((rows, width), (outputs, width), (outputs,))
    x, weight, bias = (torch.randn(shape, generator=rng).to(torch.bfloat16) for shape in shapes)
    return x, weight, bias


def check(product: Linear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """One rounding to bf16 (2^-9 of the result), after an fp32 sum (1e-6 of its terms)."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    terms = x.double().abs() @ weight.double().abs().T
    found = product(x, weight, bias)
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + terms * 1e-6).all()


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 6, 7, 8, 15, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("outputs", [1, 3, 4, 5, 31, 32, 33, 200])
def test_rows_and_outputs(product: Linear, rows: int, outputs: int, rng: torch.Generator) -> None:
    x, weight, bias = random_layer(rows, outputs, 64, rng)
    check(product, x, weight, bias)
    check(product, x, weight, None)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 48, 576, 1536])
def test_widths(product: Linear, width: int, rng: torch.Generator) -> None:
    check(product, *random_layer(5, 70, width, rng))


def test_many_outputs_on_every_number_of_threads(
    product: Linear, rng: torch.Generator, set_threads: Callable[[int], None]
) -> None:
    layer = random_layer(8, 3001, 64, rng)
    for threads in (1, 2, 5):
        set_threads(threads)
        check(product, *layer)


def test_special_values(product: Linear) -> None:
    """Infinities, NaN and overflow reach the result as in torch; nothing leaks into other rows or columns."""
    x = torch.ones(3, 16, dtype=torch.bfloat16)
    x[1, 3] = torch.inf
    weight = torch.ones(6, 16, dtype=torch.bfloat16)
    weight[2, 5], weight[4] = torch.nan, 3e38
    expected = torch.nn.functional.linear(x.double(), weight.double()).to(torch.bfloat16)
    torch.testing.assert_close(product(x, weight, None), expected, equal_nan=True)


def test_what_does_not_fit_is_refused() -> None:
    x, weight, bias = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((2, 16), (4, 16), (4,)))
    with pytest.raises(ValueError, match="x must be a contiguous"):
        linear(x.float(), weight, bias)
    with pytest.raises(ValueError, match="weight must be a contiguous"):
        linear(x, weight.T, bias)
    with pytest.raises(ValueError, match="x has 16 columns, weight 8"):
        linear(x, weight[:, :8].contiguous(), bias)
    with pytest.raises(ValueError, match="bias has 3 entries for 4 outputs"):
        linear(x, weight, bias[:3])
