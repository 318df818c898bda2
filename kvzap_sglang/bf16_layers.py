"""Linear layers, norms and rotary embeddings of bf16 models on CPUs that have no bf16 arithmetic.

torch multiplies bf16 matrices there at a sixth of its fp32 speed, which would be most of the time of a prefill and half
of that of a decode step; norms and rotations take many passes each. Ours compute in fp32 and round once, as bf16
hardware does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from kvzap_sglang.kernels.cpu import linear, rms_norm, rotate


def cpu_lacks_bf16() -> bool:
    """Whether torch has no bf16 instructions to use on this CPU (AVX512_BF16, AMX, or Arm's)."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def replace_layers(module: torch.nn.Module) -> int:
    """Let every layer of `module` that has a form here use it. Returns how many do."""
    return sum(_replace(part) for part in module.modules())


def _replace(part: Any) -> bool:
    method = getattr(part, "quant_method", None)
    if type(method) is UnquantizedLinearMethod:
        part.quant_method = Bf16LinearMethod()
    elif type(method) is UnquantizedEmbeddingMethod:
        part.quant_method = Bf16EmbeddingMethod()
    elif type(part) is torch.nn.Linear:
        part.__class__ = Bf16Linear
    elif type(part) is RMSNorm and _is_plain(part):
        part._forward_method = partial(_norm, part)
    elif isinstance(part, RotaryEmbedding) and _rotates_whole_heads(part):
        part._forward_method = partial(_rotate_both, part)
    else:
        return False
    return True


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[..., width]` as contiguous `[n, width]`."""
    return x.reshape(-1, x.shape[-1]).contiguous()


# -- linear layers --------------------------------------------------------------------------


def _apply(weight: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return torch.nn.functional.linear(x, weight, bias)
    return linear(_rows(x), weight, bias).view(*x.shape[:-1], weight.shape[0])


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


# -- norms ----------------------------------------------------------------------------------


def _is_plain(norm: RMSNorm) -> bool:
    """Whether a norm has none of SGLang's variations."""
    variations = (norm.cast_x_before_out_mul, norm.fp32_residual, norm.variance_size_override, norm.override_orig_dtype)
    return not any(variations)


def _norm(
    norm: RMSNorm,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`RMSNorm.forward`."""
    tensors = (x, norm.weight, x if residual is None else residual)
    if post_residual_addition is not None or any(tensor.dtype != torch.bfloat16 for tensor in tensors):
        return norm.forward_native(x, residual, post_residual_addition, quant_linear)
    rest = None if residual is None else _rows(residual)
    out, total = rms_norm(_rows(x), norm.weight, norm.variance_epsilon, rest)
    return out.view(x.shape) if residual is None else (out.view(x.shape), total.view(x.shape))


# -- rotary embeddings ----------------------------------------------------------------------


def _rotates_whole_heads(rotary: RotaryEmbedding) -> bool:
    """Whether this is the plain rotation of a head's two halves, by whatever angles."""
    plain = type(rotary).forward_native is RotaryEmbedding.forward_native and not hasattr(rotary, "sin_cos_cache")
    return plain and rotary.is_neox_style and rotary.rotary_dim == rotary.head_size


def _rotate_both(
    rotary: RotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`RotaryEmbedding.forward`."""
    angles = rotary.cos_sin_cache
    narrow = all(tensor.dtype == torch.bfloat16 and tensor.dim() == 2 for tensor in (query, key, angles))
    if not narrow or offsets is not None or fused_set_kv_buffer_arg is not None:
        return rotary.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    positions = positions.flatten()
    return rotate(query, positions, angles), rotate(key, positions, angles)
