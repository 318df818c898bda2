"""What one request may ask of the press: `custom_params={"kv_press": "off"}` or `{"kv_press": {...}}`."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from kvzap_sglang.config import KVPressConfig

KEY = "kv_press"
OFF = "off"
_NAMESPACE = f"{KEY} threshold "


class OptionError(ValueError):
    """A request's press options cannot be honoured; the text says why."""


class RequestOptions(BaseModel):
    """threshold: pairs scoring below it are pruned (None: the server's). off: keep everything.

    return_kept: send the packed kept bits of all held tokens in `meta_info["kv_press"]["kept"]`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    threshold: float | None = Field(default=None, strict=True, allow_inf_nan=False)
    off: StrictBool = False
    return_kept: StrictBool = False

    def threshold_for(self, config: KVPressConfig) -> float:
        """The effective threshold on a server of this configuration."""
        if self.off:
            return -math.inf
        return config.threshold if self.threshold is None else self.threshold


def parse_options(custom_params: Any) -> RequestOptions:
    """Options of a request's `custom_params` (None, or a dict with or without the key). Raises `OptionError`."""
    if not isinstance(custom_params, dict) or KEY not in custom_params:
        return RequestOptions()
    given = custom_params[KEY]
    if given == OFF:
        return RequestOptions(off=True)
    if not isinstance(given, dict):
        raise OptionError(f'custom_params["{KEY}"] must be "{OFF}" or an object such as {{"threshold": -4}}')
    try:
        return RequestOptions.model_validate(given)
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(str(part) for part in fault["loc"])
        known = ", ".join(RequestOptions.model_fields)
        raise OptionError(f'custom_params["{KEY}"].{name}: {fault["msg"]} (known options: {known})') from error


def check_options(options: RequestOptions, config: KVPressConfig) -> None:
    """Raises `OptionError` for what this server's press or lock does not allow."""
    if options.off and options.threshold is not None:
        raise OptionError(f'custom_params["{KEY}"]: give "off" or a threshold, not both')
    if options.threshold_for(config) == config.threshold:
        return
    if config.kv_press_lock:
        raise OptionError(
            f'custom_params["{KEY}"]: this server fixes the threshold at {config.threshold} (--kv-press-lock); '
            "leave the option out"
        )
    if config.kv_press == "streaming" and not options.off:
        raise OptionError(f'custom_params["{KEY}"].threshold means nothing to --kv-press streaming: use "{OFF}"')
    if config.kv_press == "random" and (options.threshold or 0.0) > 0.0:
        raise OptionError(f'custom_params["{KEY}"].threshold of --kv-press random must be <= 0 (it removes exp(T))')


def cache_namespace(extra_key: str | None, custom_params: Any, config: KVPressConfig) -> str | None:
    """Key under which a request's prefix is shared: only with requests of the same effective threshold.

    The server's own threshold leaves `extra_key` as it is, except one that looks like a key of ours: no client may
    name its way into the prefixes of another threshold.
    """
    threshold = parse_options(custom_params).threshold_for(config)
    if threshold == config.threshold and not (extra_key or "").startswith(_NAMESPACE):
        return extra_key
    return f"{_NAMESPACE}{threshold!r} {extra_key!r}"
