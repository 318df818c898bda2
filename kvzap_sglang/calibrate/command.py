"""`kvzap-sglang calibrate`: train the surrogates of a model on a corpus."""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file

from kvzap_sglang.calibrate.checkpoint import load_layer, model_digest, save_layer, surrogate_name, write_surrogate
from kvzap_sglang.calibrate.collect import Collected, CollectSettings, collect
from kvzap_sglang.calibrate.corpus import Prompts, cut_prompts, read_corpus
from kvzap_sglang.calibrate.errors import CalibrationError
from kvzap_sglang.calibrate.plots import draw
from kvzap_sglang.calibrate.provenance import provenance
from kvzap_sglang.calibrate.quality import Predictions, report
from kvzap_sglang.calibrate.targets import check_model
from kvzap_sglang.calibrate.train import MlpSettings, mlp, predict, ridge

WORK_FOLDER = "collected"
Kind = Literal["linear", "mlp"]


@dataclass(frozen=True)
class Calibration:
    """A run, once everything has been read and checked."""

    args: argparse.Namespace
    model: Any
    prompts: Prompts
    settings: CollectSettings
    mlp_settings: MlpSettings

    @property
    def work(self) -> Path:
        folder: Path = self.args.out / WORK_FOLDER
        return folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="the model to calibrate for: folder or hub id")
    parser.add_argument(
        "--corpus",
        required=True,
        nargs="+",
        type=Path,
        help="text or JSONL files, or folders of them; documents of 750 tokens and more",
    )
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        help="the surrogates' folders are made in it; a run taken up again finds its work there",
    )
    parser.add_argument(
        "--kind", choices=("mlp", "linear", "both"), default="both", help="what to train (default: both)"
    )
    parser.add_argument(
        "--target",
        choices=("kvzip+", "kvzip"),
        default="kvzip+",
        help="score to predict (default: kvzip+, as published)",
    )
    parser.add_argument(
        "--removed",
        type=float,
        default=0.7,
        help="fraction of decided pairs that the default threshold should remove (default: 0.7)",
    )
    parser.add_argument("--train-prompts", type=int, help="use at most this many (default: all)")
    parser.add_argument(
        "--held-out",
        type=int,
        default=5,
        help="documents held out per kind of text, where the corpus does not say (default: 5)",
    )
    parser.add_argument("--tokens", type=int, default=500, help="positions taken of each prompt (default: 500)")
    parser.add_argument("--hidden-dim", type=int, help="width of the MLP (default: hidden size / 8)")
    parser.add_argument("--epochs", type=int, default=15, help="of the MLP (default: 15)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="auto: the model's own on CUDA, float32 on a CPU",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda where there is one"
    )
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, or 2 after one line that says what to change."""
    try:
        calibrate(args)
    except CalibrationError as error:
        print(f"kvzap-sglang calibrate: {error}", file=sys.stderr)
        return 2
    return 0


def calibrate(args: argparse.Namespace) -> list[Path]:
    """Returns the folders written. Raises CalibrationError before anything is."""
    calibration = _prepare(args)
    documents = calibration.prompts
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train, held_out = (
        collect(calibration.model, tokenizer, texts, calibration.work, calibration.settings, label=label)
        for texts, label in ((documents.train, "training prompts"), (documents.held_out, "held-out prompts"))
    )
    kinds: tuple[Kind, ...] = ("linear", "mlp") if args.kind == "both" else (args.kind,)
    return [_make(calibration, kind, train, held_out) for kind in kinds]


def _prepare(args: argparse.Namespace) -> Calibration:
    _check_numbers(args)
    if args.out.exists() and not args.out.is_dir():
        raise CalibrationError(f"--out {args.out}: this is a file. Give a folder.")
    config, tokenizer, folder = _open_model(args.model)
    prompts = cut_prompts(tokenizer, read_corpus(args.corpus), held_out=args.held_out, seed=args.seed)
    prompts = Prompts(prompts.train[: args.train_prompts], prompts.held_out)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    if device == "cuda" and not torch.cuda.is_available():
        raise CalibrationError("--device cuda: torch finds no CUDA device here. Leave the flag out.")
    dtype = ("float32" if device == "cpu" else "auto") if args.dtype == "auto" else args.dtype
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
    try:
        check_model(model)
    except ValueError as error:
        raise CalibrationError(
            f"--model {args.model}: {error}. Surrogates can be made for Llama, Mistral and Qwen models."
        ) from error
    settings = CollectSettings(
        model_digest(folder), str(model.dtype).removeprefix("torch."), args.target == "kvzip+", args.tokens, args.seed
    )
    width = args.hidden_dim or max(1, config.hidden_size // 8)
    return Calibration(args, model, prompts, settings, MlpSettings(width, args.epochs, seed=args.seed))


def _check_numbers(args: argparse.Namespace) -> None:
    for flag, value, least in (
        ("--train-prompts", args.train_prompts, 2),
        ("--held-out", args.held_out, 1),
        ("--tokens", args.tokens, 1),
        ("--hidden-dim", args.hidden_dim, 1),
        ("--epochs", args.epochs, 1),
    ):
        if value is not None and value < least:
            raise CalibrationError(f"{flag} {value}: give at least {least}.")
    if not 0 < args.removed < 1:
        raise CalibrationError(f"--removed {args.removed}: give a fraction between 0 and 1.")


def _open_model(name: str) -> tuple[Any, Any, Path]:
    """Config, tokenizer and local folder of a model."""
    try:
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        folder = Path(cached_file(name, "config.json")).parent
    except (OSError, ValueError) as error:
        first = " ".join(str(error).split())[:300]
        raise CalibrationError(
            f"--model {name}: cannot be opened ({first}). Give a model's folder or hub id."
        ) from error
    return config, tokenizer, folder


def _make(calibration: Calibration, kind: Kind, train: Collected, held_out: Collected) -> Path:
    """Train, measure and write one surrogate; returns its folder."""
    args = calibration.args
    fingerprint = hashlib.sha256(repr((kind, calibration.mlp_settings, [file.name for file in train.files])).encode())
    trained = calibration.work / f"{kind}-{fingerprint.hexdigest()[:16]}"
    trained.mkdir(parents=True, exist_ok=True)
    layers, predicted, targets = [], [], []
    for index in tqdm(range(calibration.model.config.num_hidden_layers), desc=f"{kind} surrogate", unit="layer"):
        layers.append(_trained(calibration, kind, train, index, trained / f"layer_{index:03d}.safetensors"))
        hidden, target = held_out.layer(index)
        predicted.append(predict(layers[-1], hidden))
        targets.append(target)
    kinds = [d.kind for d, n in zip(calibration.prompts.held_out, held_out.counts(), strict=True) for _ in range(n)]
    predictions = Predictions(torch.stack(predicted, 1), torch.stack(targets, 1), kinds)
    pairs = {"train": sum(train.counts()), "held_out": sum(held_out.counts())}
    documents = calibration.prompts
    result = {
        **provenance(calibration.settings, calibration.mlp_settings, args, documents, pairs),
        **report(predictions, args.removed),
    }
    folder: Path = args.out / surrogate_name(kind, args.model)
    write_surrogate(folder, layers, calibration.mlp_settings.hidden_dim if kind == "mlp" else None, result)
    drawn = draw(folder / "plots", predictions, result)
    print(f"{folder}: held-out R² {result['r2']:.3f}, default threshold {result['default_threshold']}", flush=True)
    if not drawn:
        print("no plots: matplotlib is not installed (pip install 'kvzap-sglang[evaluate]')", flush=True)
    return folder


def _trained(calibration: Calibration, kind: Kind, train: Collected, index: int, file: Path) -> nn.Module:
    layer = load_layer(file)
    if layer is None:
        device = str(calibration.model.device)
        layer = ridge(train, index) if kind == "linear" else mlp(train, index, calibration.mlp_settings, device)
        save_layer(layer, file)
    return layer
