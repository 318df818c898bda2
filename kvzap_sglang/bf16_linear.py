"""Linear layers of bf16 models on CPUs that have no bf16 arithmetic.

torch multiplies bf16 matrices there at a sixth of its fp32 speed, and that would be most of the time of a prefill, and
half of that of a decode step. Ours sum in fp32 and round once, as bf16 hardware does.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

from kvzap_sglang.kernels.cpu import linear


def cpu_lacks_bf16() -> bool:
    """Whether torch has no bf16 instructions to use on this CPU (AVX512_BF16, AMX, or Arm's)."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _apply(weight: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return torch.nn.functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return linear(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])


class Bf16LinearMethod(UnquantizedLinearMethod):
    """SGLang's linear method with our product."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return _apply(layer.weight, x, bias)


class Bf16EmbeddingMethod(UnquantizedEmbeddingMethod):
    """The same for an output layer (tied to the embedding or not)."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return _apply(layer.weight, x, bias)


class Bf16Linear(torch.nn.Linear):
    """`torch.nn.Linear` with our product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _apply(self.weight, x, self.bias)


def replace_linears(module: torch.nn.Module) -> int:
    """Let every unquantised linear layer of `module` use our product. Returns how many."""
    replaced = 0
    for part in module.modules():
        method: Any = getattr(part, "quant_method", None)
        if type(method) is UnquantizedLinearMethod:
            part.quant_method = Bf16LinearMethod()
        elif type(method) is UnquantizedEmbeddingMethod:
            part.quant_method = Bf16EmbeddingMethod()
        elif type(part) is torch.nn.Linear:
            part.__class__ = Bf16Linear
        else:
            continue
        replaced += 1
    return replaced
