"""The press options as argparse flags, generated from `KVPressConfig`."""

from __future__ import annotations

import argparse
import os
import re
import typing
from typing import Any

from kvzap_sglang.config import KVPressConfig, build_config, flag_name, from_environment


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field; None stands for "not given" so that YAML and environment can fill it."""
    # argparse takes `-inf` for an option unless it looks like a negative number to it.
    parser._negative_number_matcher = re.compile(r"^-(\d+|\d*\.\d+|\d+(\.\d*)?[eE][-+]?\d+|inf)$")
    group = parser.add_argument_group("kvzap-sglang: KV cache pruning")
    for name, field in KVPressConfig.model_fields.items():
        if field.annotation is bool:
            group.add_argument(flag_name(name), dest=name, action="store_true", default=None, help=field.description)
            continue
        choices, kind = _choices_and_type(field.annotation)
        default = "" if field.is_required() or field.default is None else f" (default: {field.default})"
        group.add_argument(
            flag_name(name),
            dest=name,
            type=kind,
            choices=choices,
            default=None,
            help=f"{field.description}{default}".replace("%", "%%"),
        )


def config_from_namespace(args: argparse.Namespace) -> KVPressConfig | None:
    """The configuration of a parsed command line, environment variables filling what is not given."""
    options: dict[str, Any] = dict(from_environment(os.environ))
    for name in KVPressConfig.model_fields:
        value = getattr(args, name, None)
        if value is not None:
            options[name] = value
    return build_config(options)


def _choices_and_type(annotation: Any) -> tuple[tuple[str, ...] | None, type]:
    inner = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
    if typing.get_origin(annotation) is typing.Literal:
        return tuple(typing.get_args(annotation)), str
    if typing.get_origin(annotation) is not None:  # `X | None`
        return None, inner[0]
    return None, annotation
