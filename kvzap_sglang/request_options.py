"""What one request may ask of the press: `custom_params={"kv_press": {...}}`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, StrictBool, ValidationError

KEY = "kv_press"


class OptionError(ValueError):
    """A request's press options cannot be honoured; the text says why."""


class RequestOptions(BaseModel):
    """return_kept: send the packed kept bits of all held tokens in `meta_info["kv_press"]["kept"]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    return_kept: StrictBool = False


def parse_options(custom_params: Any) -> RequestOptions:
    """Options of a request's `custom_params` (None, or a dict with or without the key). Raises `OptionError`."""
    if not isinstance(custom_params, dict) or KEY not in custom_params:
        return RequestOptions()
    given = custom_params[KEY]
    if not isinstance(given, dict):
        raise OptionError(f'custom_params["{KEY}"] must be an object such as {{"return_kept": true}}')
    try:
        return RequestOptions.model_validate(given)
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(str(part) for part in fault["loc"])
        known = ", ".join(RequestOptions.model_fields)
        raise OptionError(f'custom_params["{KEY}"].{name}: {fault["msg"]} (known options: {known})') from error
