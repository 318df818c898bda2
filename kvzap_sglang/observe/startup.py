"""The start-up report: what was installed, and what it costs."""

from __future__ import annotations

import logging
from typing import Any

from kvzap_sglang.config import KVPressConfig
from kvzap_sglang.observe.server_info import buffer_bytes, config_info

logger = logging.getLogger(__name__)


def log_startup(config: KVPressConfig, runner: Any) -> None:
    """Three lines: the press, the capacities, the buffers."""
    runtime = runner.kv_press_runtime
    layout = runtime.cells.layout
    options = ", ".join(f"{k.removeprefix('kv_press_')}={v}" for k, v in config_info(config).items())
    logger.info("kv press: %s (digest %s), %d layers wrapped", options, runtime.step.press.digest, layout.layers)
    logger.info(
        "kv press: %d dense tokens of physical room (%d cells of %d B), %d token slots",
        layout.physical_tokens,
        layout.cells_total,
        layout.bytes_per_cell,
        layout.virtual_tokens,
    )
    sizes = buffer_bytes(runtime)
    kv = sizes["k"] + sizes["v"]
    side = {name: size for name, size in sizes.items() if name not in ("k", "v")}
    listed = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in side.items())
    logger.info(
        "kv press: side buffers %s (%.2f %% of %.1f MiB K and V)",
        listed,
        100.0 * sum(side.values()) / kv,
        kv / 2**20,
    )
