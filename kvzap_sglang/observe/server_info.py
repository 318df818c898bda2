"""`/server_info` -> `internal_states[*].kv_press`."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from kvzap_sglang.config import KVPressConfig
from kvzap_sglang.runtime import KVPressRuntime


def server_info(config: KVPressConfig, runtime: KVPressRuntime) -> dict[str, Any]:
    """Configuration, digest, cell counts and buffer bytes of one rank (JSON-safe)."""
    layout = runtime.cells.layout
    free = runtime.allocator.own_free_cells()
    return {
        "config": config_info(config),
        "digest": runtime.step.press.digest,
        "cells_total": layout.cells_total,
        "cells_free": free,
        "cells_tree": runtime.tree.tree_cells(),
        "physical_tokens": layout.physical_tokens,
        "virtual_tokens": layout.virtual_tokens,
        "pruned_cells_total": runtime.cells.pruned_cells,
        "settled_cells_total": runtime.tree.settler.settled_cells,
        "reclaimed_cells_total": runtime.tree.settler.reclaimed_cells,
        "evicted_cells_total": runtime.tree.evicted_cells,
        "healed_cells_total": runtime.tree.healed_cells,
        "recomputed_tokens_total": runtime.tree.recomputed_tokens,
        "kept_fraction_estimate": runtime.allocator.kept_fractions.served(),
        "admission": {
            **asdict(runtime.allocator.admissions),
            "kept_fractions": {str(limit): mean for limit, mean in runtime.allocator.kept_fractions.means().items()},
        },
        "bytes_per_cell": layout.bytes_per_cell,
        "buffer_bytes": buffer_bytes(runtime),
    }


def config_info(config: KVPressConfig) -> dict[str, Any]:
    """The configuration with infinities as text, which JSON has no number for."""
    values = config.model_dump() | {"kv_press_threshold": config.threshold, "kv_press_sinks": config.sinks}
    return {k: str(v) if isinstance(v, float) and math.isinf(v) else v for k, v in values.items()}


def buffer_bytes(runtime: KVPressRuntime) -> dict[str, int]:
    """Bytes of K, V and every buffer beside them."""
    cells = runtime.cells
    rows = {"k": cells.k, "v": cells.v}
    return {name: t.numel() * t.element_size() for name, t in rows.items()} | cells.side_buffers()
