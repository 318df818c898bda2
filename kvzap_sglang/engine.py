"""The Python API: SGLang's `Engine` with a press."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.plugins import load_plugins

from kvzap_sglang.config import KVPressConfig, build_config
from kvzap_sglang.hooks.arguments import set_config


class KVPressEngine(Engine):
    """`sglang.Engine` that takes the press options as keyword arguments.

    Example:
        engine = KVPressEngine(model_path="Qwen/Qwen3-8B", kv_press="kvzap", kv_press_threshold=-4.0)

    All other arguments are `sglang.Engine`'s. Raises `KVPressConfigError` for options that cannot be
    served, before any process is started.
    """

    def __init__(self, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in KVPressConfig.model_fields if name in kwargs}
        config = build_config(options)
        if config is None:
            super().__init__(**kwargs)
            return
        load_plugins()
        kwargs.setdefault("log_level", "error")
        server_args = self.server_args_class(**kwargs)
        set_config(server_args, config.resolved_for(server_args.model_path))
        super().__init__(server_args=server_args)
