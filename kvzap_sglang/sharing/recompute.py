"""What a request does that branches where its window is already pruned (`--kv-press-hit-window recompute`).

It takes less of the match than there is, recomputes the rest, and gives the recomputed cells to the tree where the
tree pruned its own: the next request on that branch finds its window there.

How much less depends on the prefill rule. `dense`: one window, so that the request sees every pair of its last w
positions; the recomputed ones come from hidden states that saw the pruned prefix. `sparse` promises that a hit
equals a cold run, which takes L windows (L layers): a condemned cell of layer l depends on the condemned cells of
layer l - 1 in the window before it, and so on down to layer 0, whose cells depend on the token alone.
"""

from __future__ import annotations

import numpy as np

from kvzap_sglang.memory.head_token_sets import BoolArray


def usable_prefix(pruned: BoolArray, length: int, window: int, depth: int) -> int:
    """Longest prefix of a match that a request can start from with its window in memory.

    pruned: bool `[n]`, whether a token lost a cell, for the last n positions below `length`: at least
        `depth + window` of them, or all. length: matched tokens.
    depth: tokens to recompute at most. Returns `length` when its window is whole, else the last position within
    `depth` whose window is, else `length - depth` (not below 0).
    """
    if not pruned[max(0, len(pruned) - window) :].any():
        return length
    first = length - len(pruned)
    lost = np.concatenate([[0], np.cumsum(pruned)])
    lowest = max(0, length - depth)
    ends = np.arange(lowest, length)
    below = np.maximum(ends - window, first) - first
    whole = np.flatnonzero(lost[ends - first] == lost[below])
    return int(ends[whole[-1]]) if len(whole) else lowest
