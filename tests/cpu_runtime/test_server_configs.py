"""Every file in server_configs/ goes through SGLang's own --config reader and names a valid press."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvzap_sglang.cli_flags import add_flags, config_from_namespace

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "server_configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    if "--kv-press" not in parser._option_string_actions:  # the plugin may have been loaded by another test
        add_flags(parser)
    return parser


def read(parser: argparse.ArgumentParser, path: Path, *flags: str) -> argparse.Namespace:
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    merged = ConfigArgumentMerger(parser).merge_config_with_args(["--config", str(path), *flags])
    return parser.parse_args(merged)


def test_there_is_one_for_each_published_surrogate_and_the_cpu() -> None:
    names = [path.stem for path in CONFIGS]
    assert names == ["llama-3.1-8b-h100", "qwen3-32b-h200", "qwen3-8b-h100", "smollm2-cpu"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_is_what_sglang_and_the_press_accept(parser: argparse.ArgumentParser, path: Path) -> None:
    args = read(parser, path)
    config = config_from_namespace(args)
    assert config is not None and config.kv_press == "kvzap"
    assert args.enable_cache_report
    if path.stem == "smollm2-cpu":
        assert (args.device, args.max_total_tokens, config.kv_press_model) == ("cpu", 16384, None)
        return
    # What is written out for the reader must be what the plugin would have chosen.
    bare = config.model_copy(update={"kv_press_model": None, "kv_press_threshold": None})
    assert bare.resolved_for(args.model_path) == config


def test_a_flag_wins_over_the_file(parser: argparse.ArgumentParser) -> None:
    path = next(path for path in CONFIGS if path.stem == "smollm2-cpu")
    config = config_from_namespace(read(parser, path, "--kv-press-threshold", "-5.5", "--kv-press-model", "folder"))
    assert config is not None
    assert (config.kv_press_threshold, config.kv_press_model) == (-5.5, "folder")
