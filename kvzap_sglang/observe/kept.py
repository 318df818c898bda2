"""Kept sets on the wire: base64 of packed bits."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt


def pack_kept(packed: npt.NDArray[np.uint8]) -> str:
    """uint8 `[tokens, bytes]` (`numpy.packbits` per token over layer-major (layer, head)) -> base64."""
    return base64.b64encode(np.ascontiguousarray(packed).tobytes()).decode("ascii")


def unpack_kept(info: dict[str, Any]) -> npt.NDArray[np.bool_]:
    """bool `[tokens, layers, kv_heads]` of `meta_info["kv_press"]` (asked for with `return_kept`).

    True where the pair scored at or above the threshold (or is a sink). The last `window` tokens'
    other pairs are still in memory. Raises `KeyError` when the request did not ask for it.
    """
    if "kept" not in info:
        raise KeyError('no kept sets here: send custom_params={"kv_press": {"return_kept": true}}')
    tokens, layers, heads = info["kept_shape"]
    packed = np.frombuffer(base64.b64decode(info["kept"]), dtype=np.uint8).reshape(tokens, -1)
    bits = np.unpackbits(packed, axis=1, count=layers * heads)
    return bits.astype(np.bool_).reshape(tokens, layers, heads)
