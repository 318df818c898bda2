"""Lending a transformers model another attention for the duration of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

_ATTENTION = "kvzap_lent"

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""`(layer, q [B, Hq, n, d], k [B, H, n, d], v [B, H, n, d], scaling) -> [B, Hq, n, d]`; q and k are rotated."""


@contextmanager
def attending_by(model: Any, attend: Attend, on_hidden: Callable[[Tensor], Any] | None = None) -> Iterator[None]:
    """Within the block `attend` is the attention of every layer, and `on_hidden` sees its input `[B, n, D]` before."""
    AttentionInterface.register(_ATTENTION, _forward)
    before = model.config._attn_implementation
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            partial(_before, attend=attend, on_hidden=on_hidden), with_kwargs=True
        )
        for layer in model.base_model.layers
    ]
    try:
        model.set_attn_implementation(_ATTENTION)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(before)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """What the model's own would be: causal, over all keys."""
    group = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1) for each in (key, value))
    return nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kvzap_attend: Attend,
    **_: Any,
) -> tuple[Tensor, None]:
    out = kvzap_attend(int(module.layer_idx), query, key, value, scaling)  # type: ignore[arg-type]
    return out.transpose(1, 2), None


def _before(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    attend: Attend,
    on_hidden: Callable[[Tensor], Any] | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if on_hidden is not None:
        on_hidden(kwargs["hidden_states"])
    return args, {**kwargs, "kvzap_attend": attend}
