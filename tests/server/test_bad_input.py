"""Bad input: a clear message, and a server that never starts or stays up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch

from tests.servers import Server, failed_start, model_path, serve
from tests.surrogates import make_surrogate
from tests.workloads import tokens

pytestmark = pytest.mark.server

TINY = "tiny-llama-random"
SHAPE = {"hidden": 64, "layers": 2, "kv_heads": 2}


def press(path: Path, *more: str) -> tuple[str, ...]:
    return (
        "--kv-press",
        "kvzap",
        "--kv-press-model",
        str(path),
        "--max-total-tokens",
        "600",
        "--dtype",
        "float32",
        *more,
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny server with 600 dense tokens of room, whose threshold requests may not change."""
    folder = tmp_path_factory.mktemp("small")
    make_surrogate(folder / "surrogate", **SHAPE, default_threshold=0.0)
    with serve(
        model_path(TINY),
        folder / "server.log",
        *press(folder / "surrogate", "--kv-press-lock", "--chunked-prefill-size", "256"),
    ) as server:
        yield server


def test_wrong_shape_shows_both(tmp_path: Path) -> None:
    make_surrogate(tmp_path / "s", hidden=72, layers=3, kv_heads=4)
    log = failed_start(model_path(TINY), tmp_path / "log", *press(tmp_path / "s", "--kv-press-threshold", "-4"))
    assert "--kv-press-model" in log
    for number in ("72", "64"):
        assert number in log
    assert "Traceback" not in log


def test_truncated_weights(tmp_path: Path) -> None:
    make_surrogate(tmp_path / "s", **SHAPE)
    weights = tmp_path / "s" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    log = failed_start(model_path(TINY), tmp_path / "log", *press(tmp_path / "s", "--kv-press-threshold", "-4"))
    assert "--kv-press-model" in log and "safetensors" in log


def test_pickle_is_refused(tmp_path: Path) -> None:
    make_surrogate(tmp_path / "s", **SHAPE)
    (tmp_path / "s" / "model.safetensors").unlink()
    torch.save({}, tmp_path / "s" / "pytorch_model.bin")
    log = failed_start(model_path(TINY), tmp_path / "log", *press(tmp_path / "s", "--kv-press-threshold", "-4"))
    assert "--kv-press-model" in log and "safetensors" in log


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((), "--kv-press-threshold"),
        (("--kv-press-threshold", "nan"), "--kv-press-threshold"),
        (("--kv-press-threshold", "-4", "--page-size", "16"), "--page-size"),
        (("--kv-press-threshold", "-4", "--attention-backend", "torch_native"), "--attention-backend"),
        (("--kv-press-threshold", "-4", "--enable-hierarchical-cache"), "--enable-hierarchical-cache"),
        (("--kv-press-threshold", "-4", "--tp-size", "4"), "--tp-size"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_flags(flags: tuple[str, ...], named: str, tmp_path: Path) -> None:
    make_surrogate(tmp_path / "s", **SHAPE)
    log = failed_start(model_path(TINY), tmp_path / "log", *press(tmp_path / "s", *flags))
    assert f"error: {named}" in log or f"{named} " in log
    assert "Traceback" not in log


def test_half_precision_is_refused(tmp_path: Path) -> None:
    make_surrogate(tmp_path / "s", **SHAPE)
    flags = press(tmp_path / "s", "--kv-press-threshold", "-4", "--dtype", "float16")
    log = failed_start(model_path(TINY), tmp_path / "log", *flags)
    assert "--dtype bfloat16" in log and "Traceback" not in log


def test_unsupported_model_class(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(model_path(TINY)).iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["OlmoForCausalLM"]
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    log = failed_start(str(folder), tmp_path / "log", "--kv-press", "streaming", "--max-total-tokens", "600")
    assert "OlmoForCausalLM" in log and "--kv-press" in log


def test_prompt_longer_than_the_room(small: Server) -> None:
    with pytest.raises(RuntimeError, match="--max-total-tokens"):
        small.generate(list(range(100, 800)), 4)
    assert len(small.generate(list(range(100, 500)), 4)["output_ids"]) == 4


@pytest.mark.parametrize(
    ("custom", "says"),
    [
        ({"treshold": -3}, "known options"),
        ({"threshold": "low"}, "number"),
        ({"threshold": True}, "number"),
        ({"return_kept": "yes"}, "boolean"),
        (7, "must be"),
        ("on", "must be"),
        ({"threshold": -3}, "--kv-press-lock"),
        ("off", "--kv-press-lock"),
    ],
    ids=str,
)
def test_request_options_that_cannot_be_honoured_are_a_400(small: Server, custom: object, says: str) -> None:
    with pytest.raises(RuntimeError, match=rf"400: .*kv_press.*{says}"):
        small.generate([5, 6, 7], 2, custom=custom)
    assert len(small.generate([5, 6, 7], 2)["output_ids"]) == 2


def test_weight_updates_are_refused(small: Server) -> None:
    answer = requests.post(f"{small.url}/update_weights_from_disk", json={"model_path": model_path(TINY)}, timeout=60)
    assert "--kv-press" in answer.text and not answer.json()["success"]
    assert len(small.generate([5, 6, 7], 2)["output_ids"]) == 2


@pytest.mark.parametrize("new_tokens", [0, 1])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 256, 257])
def test_boundary_lengths(small: Server, length: int, new_tokens: int) -> None:
    import random

    answer = small.generate(tokens(random.Random(length), length), new_tokens)
    assert len(answer["output_ids"]) == new_tokens
