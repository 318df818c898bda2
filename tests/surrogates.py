"""Tiny KVzap checkpoints for tests, in kvpress' format, with seeded random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def make_surrogate(
    path: Path,
    hidden: int,
    layers: int,
    kv_heads: int,
    hidden_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    scale: float = 1.0,
    default_threshold: float | None = None,
) -> Path:
    """Write `config.json` and `model.safetensors` under `path` (made if absent) and return `path`.

    Weights are normal with deviation `scale / sqrt(fan_in)`, so that linear scores of unit-variance inputs
    spread by about `scale`; biases are normal with deviation `scale / 4`.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, deviation: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * deviation).to(dtype)

    parts = [("", hidden, kv_heads)]
    if hidden_dim is not None:
        parts = [(".0", hidden, hidden_dim), (".2", hidden_dim, kv_heads)]
    tensors = {}
    for layer in range(layers):
        for part, fan_in, fan_out in parts:
            tensors[f"layers.{layer}{part}.weight"] = normal(fan_out, fan_in, deviation=scale / fan_in**0.5)
            tensors[f"layers.{layer}{part}.bias"] = normal(fan_out, deviation=scale / 4)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["KVzapModel"],
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_dim": hidden_dim,
        "input_dim": hidden,
        "model_type": "kvzap",
        "n_modules": layers,
        "output_dim": kv_heads,
    }
    if default_threshold is not None:
        config["default_threshold"] = default_threshold
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def tiny_press(folder: Path, threshold: str = "0") -> tuple[str, ...]:
    """Flags of a press for the tiny models: condemns about half of all pairs at 0, window 32."""
    make_surrogate(folder, hidden=64, layers=2, kv_heads=2)
    return (
        *("--kv-press", "kvzap", "--kv-press-model", str(folder)),
        *(f"--kv-press-threshold={threshold}", "--kv-press-window", "32"),
    )
