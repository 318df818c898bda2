"""A surrogate's folder: kvpress' files, and what it was made of and how good it is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from kvzap_sglang.presses.surrogate import CONFIG_FILE, WEIGHTS_FILE

REPORT_FILE = "calibration.json"


def surrogate_name(kind: str, model: str) -> str:
    """NVIDIA's naming: `KVzap-{mlp|linear}-{the model's basename}`."""
    return f"KVzap-{kind}-{os.path.basename(os.path.normpath(model))}"


def write_surrogate(folder: Path, layers: Sequence[nn.Module], hidden_dim: int | None, report: dict[str, Any]) -> None:
    """Write `config.json`, `model.safetensors` (float32) and `calibration.json` to `folder`, all or nothing.

    `report["default_threshold"]` goes to `config.json` too, where the server and `--kv-press-model` find it.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {
        f"layers.{index}.{name}": tensor.contiguous()
        for index, layer in enumerate(layers)
        for name, tensor in layer.state_dict().items()
    }
    save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
    linears = [module for module in layers[0].modules() if isinstance(module, nn.Linear)]
    config = {
        "architectures": ["KVzapModel"],
        "default_threshold": report["default_threshold"],
        "dtype": "float32",
        "hidden_dim": hidden_dim,
        "input_dim": linears[0].in_features,
        "model_type": "kvzap",
        "n_modules": len(layers),
        "output_dim": linears[-1].out_features,
        "transformers_version": transformers.__version__,
    }
    _dump(config, partial / CONFIG_FILE)
    _dump(report, partial / REPORT_FILE)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def model_digest(folder: Path) -> str:
    """sha256 (first 16 hex digits) over `config.json` and the weights files of a model's folder."""
    digest = hashlib.sha256()
    for file in sorted([folder / CONFIG_FILE, *folder.glob("*.safetensors")]):
        digest.update(file.name.encode())
        with file.open("rb") as opened:
            while block := opened.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()[:16]


def save_layer(layer: nn.Module, file: Path) -> None:
    """One trained layer, so that training can be taken up again."""
    partial = file.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in layer.state_dict().items()}, partial)
    os.replace(partial, file)


def load_layer(file: Path) -> nn.Module | None:
    """What `save_layer` wrote; None if it is not there or not whole."""
    try:
        tensors = load_file(file)
    except (FileNotFoundError, SafetensorError):
        return None
    linears = [nn.Linear(*tensors[name].shape[::-1]) for name in sorted(tensors) if name.endswith("weight")]
    layer: nn.Module = linears[0] if len(linears) == 1 else nn.Sequential(linears[0], nn.GELU(), linears[1])
    layer.load_state_dict(tensors)
    return layer


def _dump(value: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
