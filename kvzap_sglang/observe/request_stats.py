"""What a finished request kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvzap_sglang.memory.head_token_sets import HeadTokenSets
from kvzap_sglang.memory.layout import CellLayout
from kvzap_sglang.observe.kept import pack_kept


def request_stats(sets: HeadTokenSets, layout: CellLayout, window: int, *, return_kept: bool) -> dict[str, Any]:
    """`meta_info["kv_press"]` from the sets of all tokens a request held at its end.

    kept_cells: cells in memory (kept pairs, and everything not yet settled, such as the window).
    dense_cells: cells of the same tokens without pruning. window: the press's window.
    """
    dense = len(sets) * layout.cells_per_token
    kept = int(np.where(sets.settled, sets.counts, sets.cells_per_token).sum())
    stats: dict[str, Any] = {
        "kept_fraction": kept / dense if dense else 1.0,
        "kept_cells": kept,
        "dense_cells": dense,
        "window": window,
    }
    if return_kept:
        stats["kept"] = pack_kept(sets.packed)
        stats["kept_shape"] = [len(sets), layout.layers, layout.heads]
    return stats
