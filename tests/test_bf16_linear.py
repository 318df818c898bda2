"""Linear layers of a bf16 model on a CPU without bf16 arithmetic."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

from kvzap_sglang import bf16_linear
from kvzap_sglang.bf16_linear import replace_linears


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
    product = bf16_linear.linear
    monkeypatch.setattr(bf16_linear, "linear", lambda *args: (calls.append(args[0].shape), product(*args))[1])
    found, x = model(), torch.randn(shape).bfloat16()
    before = outputs(found, x)
    assert replace_linears(found) == 3 and calls == []
    for ours, torchs in zip(outputs(found, x), before, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=2**-7, atol=0.02)
    assert len(calls) == 3


def test_other_dtypes_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found, x = model(torch.float32), torch.randn(3, 32)
    before = outputs(found, x)
    replace_linears(found)
    monkeypatch.setattr(bf16_linear, "linear", None)
    assert all(torch.equal(ours, torchs) for ours, torchs in zip(outputs(found, x), before, strict=True))


def test_the_output_layer_is_asked_through_its_method() -> None:
    """Or SGLang multiplies by its weight itself, which would be a tenth of a decode step."""
    layer = Layer(UnquantizedEmbeddingMethod())
    assert not should_apply_lm_head_quant_method(layer, layer.quant_method)
    replace_linears(layer)
    assert should_apply_lm_head_quant_method(layer, layer.quant_method)
