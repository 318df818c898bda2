"""One model behind flags, environment and Python options."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest

from kvzap_sglang.cli_flags import add_flags, config_from_namespace
from kvzap_sglang.config import (
    KNOWN_PAIRS,
    KVPressConfig,
    KVPressConfigError,
    build_config,
    environment_name,
    flag_name,
)
from kvzap_sglang.presses.surrogate import read_config
from tests.surrogates import make_surrogate


def parse(*argv: str) -> KVPressConfig | None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return config_from_namespace(parser.parse_args(argv))


def test_no_flag_no_press() -> None:
    assert parse() is None


@pytest.mark.parametrize("form", [["--kv-press-threshold", "-inf"], ["--kv-press-threshold=-inf"]])
def test_threshold_accepts_minus_infinity(form: list[str]) -> None:
    config = parse("--kv-press", "kvzap", *form)
    assert config is not None and config.threshold == -math.inf


@pytest.mark.parametrize("value", ["-4", "-3.5", "-1e-3", "2"])
def test_threshold_accepts_negative_numbers(value: str) -> None:
    config = parse("--kv-press", "kvzap", "--kv-press-threshold", value)
    assert config is not None and config.threshold == float(value)


def test_defaults() -> None:
    config = parse("--kv-press", "kvzap", "--kv-press-threshold", "-4")
    assert config is not None
    assert (config.kv_press_window, config.kv_press_prefill, config.kv_press_headroom) == (128, "dense", 4.0)
    assert config.sinks == 0


@pytest.mark.parametrize("press", ["streaming", "random"])
def test_baselines_keep_four_sinks(press: str) -> None:
    config = build_config({"kv_press": press, "kv_press_threshold": -1.0 if press == "random" else None})
    assert config is not None and config.sinks == 4
    assert config.model_copy(update={"kv_press_sinks": 0}).sinks == 0


def test_streaming_condemns_everything() -> None:
    config = build_config({"kv_press": "streaming"})
    assert config is not None and config.threshold == math.inf


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"kv_press_threshold": -4.0}, "--kv-press-threshold"),
        ({"kv_press": "snapkv"}, "--kv-press"),
        ({"kv_press": "kvzap", "kv_press_threshold": math.nan}, "--kv-press-threshold"),
        ({"kv_press": "kvzap", "kv_press_threshold": math.inf}, "--kv-press-threshold"),
        ({"kv_press": "kvzap", "kv_press_threshold": "soft"}, "--kv-press-threshold"),
        ({"kv_press": "kvzap", "kv_press_window": -1}, "--kv-press-window"),
        ({"kv_press": "kvzap", "kv_press_headroom": 0.5}, "--kv-press-headroom"),
        ({"kv_press": "kvzap", "kv_press_headroom": math.nan}, "--kv-press-headroom"),
        ({"kv_press": "kvzap", "kv_press_sinks": -1}, "--kv-press-sinks"),
        ({"kv_press": "kvzap", "kv_press_prefill": "half"}, "--kv-press-prefill"),
        ({"kv_press": "kvzap", "kv_press_hit_window": "heal"}, "--kv-press-hit-window"),
        ({"kv_press": "kvzap", "kv_press_decode": "drop"}, "--kv-press-decode"),
        ({"kv_press": "random"}, "--kv-press-threshold"),
        ({"kv_press": "random", "kv_press_threshold": 1.0}, "--kv-press-threshold"),
        ({"kv_press": "streaming", "kv_press_threshold": -3.0}, "--kv-press-threshold"),
        ({"kv_press": "streaming", "kv_press_model": "x"}, "--kv-press-model"),
    ],
)
def test_bad_options_name_their_flag(options: dict[str, object], flag: str) -> None:
    with pytest.raises(KVPressConfigError) as caught:
        build_config(options)
    assert flag in str(caught.value)
    assert "\n" not in str(caught.value)


def test_environment_fills_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_PRESS", "kvzap")
    monkeypatch.setenv("KV_PRESS_THRESHOLD", "-5")
    config = parse("--kv-press-threshold", "-3")
    assert config is not None and config.kv_press == "kvzap" and config.threshold == -3.0
    assert parse() is not None


def test_names() -> None:
    assert flag_name("kv_press_hit_window") == "--kv-press-hit-window"
    assert environment_name("kv_press_hit_window") == "KV_PRESS_HIT_WINDOW"


@pytest.mark.parametrize("model", sorted(KNOWN_PAIRS))
def test_known_pairs(model: str) -> None:
    config = build_config({"kv_press": "kvzap"})
    assert config is not None
    resolved = config.resolved_for(f"some/folder/{model}/")
    surrogate, threshold = KNOWN_PAIRS[model]
    assert resolved.surrogate == surrogate
    assert resolved.threshold == (read_config(surrogate).default_threshold if threshold is None else threshold)
    own = config.model_copy(update={"kv_press_threshold": -5.0}).resolved_for(model)
    assert own.threshold == -5.0


def test_missing_surrogate_names_the_flag() -> None:
    config = build_config({"kv_press": "kvzap", "kv_press_threshold": -4.0})
    assert config is not None
    with pytest.raises(KVPressConfigError, match="--kv-press-model"):
        config.resolved_for("unknown/model")


def test_missing_threshold_names_the_flag(tmp_path: Path) -> None:
    make_surrogate(tmp_path / "plain", hidden=8, layers=2, kv_heads=2)
    config = build_config({"kv_press": "kvzap", "kv_press_model": str(tmp_path / "plain")})
    assert config is not None
    with pytest.raises(KVPressConfigError, match="--kv-press-threshold"):
        config.resolved_for("unknown/model")


def test_a_surrogate_may_carry_its_threshold(tmp_path: Path) -> None:
    make_surrogate(tmp_path / "own", hidden=8, layers=2, kv_heads=2, default_threshold=-2.5)
    config = build_config({"kv_press": "kvzap", "kv_press_model": str(tmp_path / "own")})
    assert config is not None and config.resolved_for("unknown/model").threshold == -2.5
