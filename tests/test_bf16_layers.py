"""Layers of a bf16 model on a CPU without bf16 arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from kvzap_sglang import bf16_layers
from kvzap_sglang.bf16_layers import replace_layers


class Layer(torch.nn.Module):
    """What SGLang's layers show: a weight and a method that applies it."""

    def __init__(self, method: object, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(24, 32).to(dtype), requires_grad=False)
        self.quant_method = method


class Quantised(UnquantizedLinearMethod):
    """Some other method: not ours to replace."""


def model(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    methods = (UnquantizedLinearMethod(), UnquantizedEmbeddingMethod(), Quantised())
    return torch.nn.Sequential(*(Layer(method, dtype) for method in methods), torch.nn.Linear(32, 24).to(dtype))


def outputs(found: torch.nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    *layers, plain = found
    return [*(layer.quant_method.apply(layer, x, None) for layer in layers), plain(x)]


@pytest.mark.parametrize("shape", [(3, 32), (40, 32), (2, 5, 32), (0, 32)])
def test_answers_stay_the_same(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []
    product = bf16_layers.linear
    monkeypatch.setattr(bf16_layers, "linear", lambda *args: (calls.append(args[0].shape), product(*args))[1])
    found, x = model(), torch.randn(shape).bfloat16()
    before = outputs(found, x)
    assert replace_layers(found) == 3 and calls == []
    for ours, torchs in zip(outputs(found, x), before, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=2**-7, atol=0.02)
    assert len(calls) == 3


def test_other_dtypes_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found, x = model(torch.float32), torch.randn(3, 32)
    before = outputs(found, x)
    replace_layers(found)
    monkeypatch.setattr(bf16_layers, "linear", None)
    assert all(torch.equal(ours, torchs) for ours, torchs in zip(outputs(found, x), before, strict=True))


NORM_VARIATIONS: list[dict[str, object]] = [
    {},
    {"fp32_residual": True},
    {"cast_x_before_out_mul": True},
    {"var_hidden_size": 16},
    {"override_orig_dtype": torch.float32},
]


@pytest.mark.parametrize("variation", NORM_VARIATIONS, ids=lambda variation: next(iter(variation), "plain"))
def test_only_the_plain_norm_is_replaced(variation: dict[str, Any]) -> None:
    """And answers as before, with a residual and without, also for the heads of a query."""
    norm = RMSNorm(32, 1e-5, **variation).bfloat16()
    torch.nn.init.normal_(norm.weight)
    norm.weight.requires_grad_(False)
    x, residual = torch.randn(2, 6, 32).bfloat16(), torch.randn(2, 6, 32).bfloat16()
    before = norm.forward_native(x), *norm.forward_native(x, residual)
    assert replace_layers(norm) == (not variation)
    for ours, torchs in zip((norm(x), *norm(x, residual)), before, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=2**-7, atol=1e-6)


def test_the_rotation_answers_as_before() -> None:
    rotary = RotaryEmbedding(16, 16, 100, 10000, True, torch.bfloat16)
    projected = torch.randn(5, 3 * 16 + 16).bfloat16()
    query, key = projected.split([48, 16], dim=-1)
    positions = torch.tensor([0, 1, 50, 98, 99])
    before = rotary.forward_native(positions, query, key)
    assert replace_layers(rotary) == 1
    for ours, torchs in zip(rotary(positions, query, key), before, strict=True):
        # torch rounds after each of three operations.
        torch.testing.assert_close(ours, torchs, rtol=2**-6, atol=0.02)


@pytest.mark.parametrize(("rotary_dim", "halves"), [(8, True), (16, False)])
def test_other_rotations_are_left_to_sglang(rotary_dim: int, halves: bool) -> None:
    assert replace_layers(RotaryEmbedding(16, rotary_dim, 100, 10000, halves, torch.bfloat16)) == 0


def test_the_output_layer_is_asked_through_its_method() -> None:
    """Or SGLang multiplies by its weight itself, which would be a tenth of a decode step."""
    layer = Layer(UnquantizedEmbeddingMethod())
    assert not should_apply_lm_head_quant_method(layer, layer.quant_method)
    replace_layers(layer)
    assert should_apply_lm_head_quant_method(layer, layer.quant_method)
