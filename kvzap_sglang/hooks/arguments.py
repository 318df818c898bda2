"""Hooks on argument parsing and resolution (main process)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from kvzap_sglang.cli_flags import add_flags, config_from_namespace
from kvzap_sglang.config import KVPressConfig, KVPressConfigError

_ATTRIBUTE = "_kv_press"


def config_of(server_args: Any) -> KVPressConfig | None:
    """The press of these server arguments, None without one. Travels to every subprocess with them."""
    return getattr(server_args, _ATTRIBUTE, None)


def set_config(server_args: Any, config: KVPressConfig | None) -> None:
    """Attach the press to server arguments before they are resolved."""
    setattr(server_args, _ATTRIBUTE, config)


def add_cli_args(result: Any, parser: argparse.ArgumentParser) -> None:
    add_flags(parser)


def from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    try:
        config = config_from_namespace(args)
        if config is not None:
            config = config.resolved_for(args.model_path)
    except (KVPressConfigError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    server_args = original(cls, args)
    set_config(server_args, config)
    server_args._kv_press_from_cli = True
    return server_args


def choose_backends(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Declare our attention backend and radix cache before platform defaults are filled in."""
    if config_of(server_args) is not None:
        from sglang.srt.arg_groups.overrides import declare_resolution

        from kvzap_sglang.guard import refuse_chosen_backends
        from kvzap_sglang.plugin import BACKEND

        _refuse(server_args, lambda: refuse_chosen_backends(server_args))
        declare_resolution(server_args, "kvzap-sglang", attention_backend=BACKEND, radix_cache_backend=BACKEND)
    previous(server_args)


def validate(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Refuse what cannot be served, once everything is resolved and before anything is spawned."""
    previous(server_args)
    config = config_of(server_args)
    if config is None:
        return
    from kvzap_sglang.guard import preflight

    _refuse(server_args, lambda: preflight(server_args, config))


def _refuse(server_args: Any, check: Callable[[], None]) -> None:
    """Run `check`; on a command line its error is the program's last word, without a traceback."""
    try:
        check()
    except KVPressConfigError as error:
        if getattr(server_args, "_kv_press_from_cli", False):
            raise SystemExit(f"error: {error}") from error
        raise
