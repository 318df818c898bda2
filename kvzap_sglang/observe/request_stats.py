"""What a finished request kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvzap_sglang.memory.head_token_sets import HeadTokenSets
from kvzap_sglang.memory.layout import CellLayout
from kvzap_sglang.observe.kept import pack_kept


def join_ranks(sets: HeadTokenSets, layout: CellLayout) -> npt.NDArray[np.bool_]:
    """Kept bits bool `[n, layers, heads of all ranks]`."""
    bits = np.unpackbits(sets.packed, axis=2, count=layout.cells_per_token).astype(np.bool_)
    by_rank = bits.reshape(len(sets), sets.shape.ranks, layout.layers, layout.heads)
    return by_rank.transpose(0, 2, 1, 3).reshape(len(sets), layout.layers, -1)


def request_stats(sets: HeadTokenSets, layout: CellLayout, window: int, *, return_kept: bool) -> dict[str, Any]:
    """`meta_info["kv_press"]` from the sets of all tokens a request held at its end.

    kept_cells: cells in memory (kept pairs, and everything not yet settled, such as the window).
    dense_cells: cells of the same tokens without pruning. window: the press's window.
    """
    dense = len(sets) * sets.shape.cells_per_token * sets.shape.ranks
    kept = sets.all_cells()
    stats: dict[str, Any] = {
        "kept_fraction": kept / dense if dense else 1.0,
        "kept_cells": kept,
        "dense_cells": dense,
        "window": window,
    }
    if return_kept:
        kept_bits = join_ranks(sets, layout)
        stats["kept"] = pack_kept(np.packbits(kept_bits.reshape(len(sets), -1), axis=1))
        stats["kept_shape"] = list(kept_bits.shape)
    return stats
