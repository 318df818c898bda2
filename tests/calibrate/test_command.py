"""`kvzap-sglang calibrate` on eight prompts: what it writes, that it goes on where it stopped, what it refuses."""

from __future__ import annotations

import json
import random
import sys
import types
from pathlib import Path

import pytest
import torch

from kvzap_sglang.calibrate.collect import CollectSettings
from kvzap_sglang.cli import main
from kvzap_sglang.config import KVPressConfig
from kvzap_sglang.kernels.cpu.build import cache_dir
from kvzap_sglang.presses.surrogate import check_fits, load_surrogate
from tests.servers import model_path

KVPRESS = "kvpress-0.5.5-py3-none-any.whl"
PARAGRAPHS = (Path(__file__).parents[2] / "examples" / "handbook.md").read_text().split("\n\n")


def write_corpus(folder: Path, documents: int) -> Path:
    """Documents of some 950 tokens each: the handbook's paragraphs in orders of their own."""
    folder.mkdir()
    rng = random.Random(3)
    for index in range(documents):
        text = "\n\n".join(rng.sample(PARAGRAPHS, len(PARAGRAPHS)))[:4100]
        (folder / f"{index}.txt").write_text(text)
    return folder


def command(model: str, corpus: Path, out: Path, *more: str) -> list[str]:
    fixed = ("--epochs", "2", "--tokens", "60", "--hidden-dim", "8", "--held-out", "2")
    return ["calibrate", "--model", model, "--corpus", str(corpus), "--out", str(out), *fixed, *more]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    corpus = write_corpus(folder / "corpus", 8)
    assert main(command(model_path("tiny-qwen3-random"), corpus, folder / "out")) == 0
    return folder


@pytest.mark.parametrize(("kind", "hidden_dim"), [("linear", None), ("mlp", 8)])
def test_the_result_is_a_surrogate_of_the_model(made: Path, kind: str, hidden_dim: int | None) -> None:
    folder = made / "out" / f"KVzap-{kind}-tiny-qwen3-random"
    surrogate = load_surrogate(str(folder), dtype=torch.float32, device="cpu")
    model = json.loads((Path(model_path("tiny-qwen3-random")) / "config.json").read_text())
    sizes = {"hidden_size": model["hidden_size"], "num_layers": model["num_hidden_layers"]}
    check_fits(surrogate.config, **sizes, num_kv_heads=model["num_key_value_heads"], source="test")
    assert surrogate.config.hidden_dim == hidden_dim
    config = KVPressConfig(kv_press="kvzap", kv_press_model=str(folder)).resolved_for("anything")
    report = json.loads((folder / "calibration.json").read_text())
    assert config.threshold == report["default_threshold"]
    assert report["corpus"]["train"]["prompts"] == 6 and report["corpus"]["held_out"]["prompts"] == 2
    assert report["pairs_per_head"] == {"train": 360, "held_out": 120}
    assert 0 <= report["r2"] <= 1 and len(report["r2_per_layer"]) == model["num_hidden_layers"]
    assert {path.name for path in (folder / "plots").iterdir()} == {"r2.png", "scores.png", "thresholds.png"}


def test_kvpress_loads_it_and_scores_alike(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's own class, from its wheel; the package's other imports are not wanted."""
    wheel = cache_dir() / "wheels" / KVPRESS
    if not wheel.is_file():
        pytest.skip(f"{wheel} is missing: run `make reference-wheels`")
    package = types.ModuleType("kvpress")
    package.__path__ = [f"{wheel}/kvpress"]
    monkeypatch.setitem(sys.modules, "kvpress", package)
    monkeypatch.syspath_prepend(str(wheel))
    from kvpress.presses.kvzap_press import KVzapModel

    for kind in ("linear", "mlp"):
        folder = made / "out" / f"KVzap-{kind}-tiny-qwen3-random"
        theirs, ours = (
            KVzapModel.from_pretrained(folder),
            load_surrogate(str(folder), dtype=torch.float32, device="cpu"),
        )
        hidden = torch.randn(5, ours.config.n_modules, ours.config.input_dim)
        scores = torch.stack([ours.score(layer, hidden[:, layer]) for layer in range(ours.config.n_modules)], 1)
        torch.testing.assert_close(theirs(hidden), scores)


def test_goes_on_where_it_stopped(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One prompt's file lost, one cut short: those two are run again, and the result is the same."""
    out = made / "out"
    before = {path: path.read_bytes() for path in out.glob("KVzap-*/model.safetensors")}
    lost, cut, *_ = sorted((out / "collected").glob("*.safetensors"))
    content = cut.read_bytes()
    lost.unlink()
    cut.write_bytes(content[: len(content) // 2])
    assert main(command(model_path("tiny-qwen3-random"), made / "corpus", out)) == 0
    assert lost.is_file() and cut.read_bytes() == content
    assert {path: path.read_bytes() for path in before} == before
    assert len(list((out / "collected").glob("*.safetensors"))) == 8


def test_a_prompts_file_depends_on_all_that_decides_it() -> None:
    settings = [CollectSettings(*values) for values in (
        ("m", "float32", True, 500, 0), ("n", "float32", True, 500, 0), ("m", "bfloat16", True, 500, 0),
        ("m", "float32", False, 500, 0), ("m", "float32", True, 499, 0), ("m", "float32", True, 500, 1),
    )]  # fmt: skip
    assert len({each.file_name("text") for each in settings} | {settings[0].file_name("other")}) == 7


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--model", "/absent/model"), "--model /absent/model: cannot be opened"),
        (("--corpus", "/absent/corpus"), "--corpus /absent/corpus: no such file or folder"),
        (("--removed", "1.5"), "--removed 1.5: give a fraction"),
        (("--epochs", "0"), "--epochs 0: give at least 1"),
        (("--train-prompts", "1"), "--train-prompts 1: give at least 2"),
        (("--device", "cuda"), "--device cuda: torch finds no CUDA device"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    made: Path, tmp_path: Path, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in more and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    arguments = command(model_path("tiny-qwen3-random"), made / "corpus", tmp_path / "out", *more)
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"kvzap-sglang calibrate: {message}")
    assert not (tmp_path / "out").exists()


def test_a_corpus_too_small_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_corpus(tmp_path / "corpus", 1)
    assert main(command(model_path("tiny-qwen3-random"), corpus, tmp_path / "out")) == 2
    assert "1 documents 0 prompts to train on and 1 to measure with are left" in capsys.readouterr().err
