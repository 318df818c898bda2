"""What one request may ask of the press."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvzap_sglang.config import KVPressConfig
from kvzap_sglang.request_options import OptionError, cache_namespace, check_options, parse_options

KVZAP = KVPressConfig(kv_press="kvzap", kv_press_threshold=-4.0)
LOCKED = KVZAP.model_copy(update={"kv_press_lock": True})
STREAMING = KVPressConfig(kv_press="streaming")
RANDOM = KVPressConfig(kv_press="random", kv_press_threshold=-0.7)


@pytest.mark.parametrize(
    ("given", "threshold"),
    [(None, -4.0), ({}, -4.0), ("off", -math.inf), ({"off": True}, -math.inf), ({"threshold": -2}, -2.0)],
)
def test_effective_threshold(given: Any, threshold: float) -> None:
    params = None if given is None else {"kv_press": given, "other": 1}
    assert parse_options(params).threshold_for(KVZAP) == threshold


@pytest.mark.parametrize(
    "given", [{"threshold": math.nan}, {"threshold": math.inf}, {"threshold": "-2"}, {"threshold": True}, [], "on", 3]
)
def test_what_is_no_option_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="kv_press"):
        parse_options({"kv_press": given})


@pytest.mark.parametrize(
    ("config", "given", "says"),
    [
        (LOCKED, "off", "--kv-press-lock"),
        (LOCKED, {"threshold": -3.9}, "--kv-press-lock"),
        (STREAMING, {"threshold": -1.0}, "streaming"),
        (RANDOM, {"threshold": 0.1}, "<= 0"),
        (KVZAP, {"threshold": -1.0, "off": True}, "not both"),
    ],
)
def test_what_the_server_does_not_allow(config: KVPressConfig, given: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        check_options(parse_options({"kv_press": given}), config)


@pytest.mark.parametrize(
    ("config", "given"),
    [(LOCKED, {"threshold": -4}), (LOCKED, {"return_kept": True}), (STREAMING, "off"), (RANDOM, {"threshold": -2.0})],
)
def test_what_the_server_allows(config: KVPressConfig, given: Any) -> None:
    check_options(parse_options({"kv_press": given}), config)


def test_namespaces_differ_exactly_with_the_effective_threshold() -> None:
    def namespace(given: Any, extra_key: str | None = None) -> str | None:
        return cache_namespace(extra_key, {"kv_press": given}, KVZAP)

    assert namespace({}) is None and namespace({"threshold": -4}) is None
    assert namespace({}, "tenant") == namespace({"threshold": -4.0, "return_kept": True}, "tenant") == "tenant"
    others = {namespace("off"), namespace({"threshold": -3}), namespace({"threshold": -3}, "tenant"), None, "tenant"}
    assert len(others) == 5
    assert namespace("off") == namespace({"off": True})
