"""KVzap surrogates: read, check and run the small model that scores every token for every KV head.

A checkpoint is the folder kvpress writes with `save_pretrained`: `config.json` and `model.safetensors`. Its
layer l maps the attention input of decoder layer l (after `input_layernorm`) to one score per KV head: the
predicted natural log of KVzip+ (arXiv 2601.07891, eq. 3). Only safetensors is read, never a pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

_Header = dict[str, tuple[str, tuple[int, ...]]]  # tensor name -> (safetensors dtype, shape)

_FLAG = "--kv-press-model"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_FILE_DTYPES = ("F32", "BF16", "F16")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CHECK_REMEDY = "Check that the folder or hub id is a KVzap surrogate, or download it again."


class SurrogateError(ValueError):
    """A surrogate cannot be used. The text is one line that names --kv-press-model and what to change."""


@dataclass(frozen=True)
class SurrogateConfig:
    """Sizes of a surrogate, as in its `config.json`.

    `input_dim` is the model's hidden size, `output_dim` its number of KV heads, `n_modules` its number of
    layers; `hidden_dim` is the width of the MLP, or None for a linear surrogate. `default_threshold` (natural
    log of a score) is our own optional field: the threshold the surrogate was calibrated for.
    """

    input_dim: int
    output_dim: int
    hidden_dim: int | None
    n_modules: int
    default_threshold: float | None = None


class Surrogate(nn.Module):
    """One small module per decoder layer; all parameters are frozen and share one dtype and device.

    `config` describes the heads this object holds; `digest` identifies the checkpoint (sha256, first 16 hex
    digits, over sizes and the tensors as stored), whatever dtype it runs in and however its heads are sliced.
    """

    def __init__(self, config: SurrogateConfig, tensors: Mapping[str, Tensor], digest: str) -> None:
        """Take ownership of `tensors`, named and shaped as `tensor_shapes(config)` says."""
        super().__init__()
        self.config = config
        self.digest = digest
        with torch.device("meta"):
            self.layers = nn.ModuleList(_layer(config) for _ in range(config.n_modules))
        self.load_state_dict(dict(tensors), strict=True, assign=True)
        self.requires_grad_(False).eval()

    def score(self, layer: int, hidden: Tensor) -> Tensor:
        """Scores of tokens for every KV head of one layer.

        `hidden` is `[n, input_dim]`, the `hidden_states` argument of that layer's self-attention. Returns
        `[n, output_dim]` on the natural-log scale, in the surrogate's dtype (load it in the model's dtype to
        score as kvpress does). n may be 0.
        """
        module = self.layers[layer]
        weight = next(module.parameters())
        scores: Tensor = module(hidden.to(weight.dtype))
        return scores

    def score_into(self, layer: int, hidden: Tensor, out: Tensor) -> None:
        """As `score`, into `out`, `[n, output_dim]` of the surrogate's dtype; launches a Triton kernel."""
        from kvzap_sglang.kernels.triton import mlp_scores

        linears = [module for module in self.layers[layer].modules() if isinstance(module, nn.Linear)]
        first, last = linears[0], linears[-1]
        hidden = hidden.to(first.weight.dtype)
        if first is last:
            torch.addmm(first.bias, hidden, first.weight.T, out=out)
        else:
            mlp_scores(first(hidden), last.weight, last.bias, out)

    def slice_heads(self, start: int, stop: int) -> Surrogate:
        """A surrogate for KV heads `start <= h < stop` only (tensor parallel), with the same digest.

        The output rows are copied, so that dropping the original frees the other heads; a hidden layer is
        shared. Raises SurrogateError when the range is empty or outside the heads held.
        """
        if not 0 <= start < stop <= self.config.output_dim:
            heads = f"{start} to {stop} of the surrogate's {self.config.output_dim} KV heads"
            raise SurrogateError(f"{_FLAG}: cannot take {heads}. Use a --tp-size that divides the KV heads.")
        last = "layers.{}." if self.config.hidden_dim is None else "layers.{}.2."
        sliced = tuple(last.format(i) for i in range(self.config.n_modules))
        tensors = {
            name: tensor[start:stop].clone() if name.startswith(sliced) else tensor
            for name, tensor in self.state_dict().items()
        }
        return Surrogate(replace(self.config, output_dim=stop - start), tensors, self.digest)


def load_surrogate(path_or_id: str, *, dtype: torch.dtype, device: torch.device | str) -> Surrogate:
    """Load a surrogate from a local folder or a hub id, in `dtype` (the model's) on `device`.

    Raises SurrogateError for every reason the checkpoint cannot be used.
    """
    folder = _locate(path_or_id, [CONFIG_FILE, WEIGHTS_FILE])
    config = _parse_config(folder / CONFIG_FILE, path_or_id)
    tensors = _read_tensors(folder, config, path_or_id)
    digest = _digest(config, tensors)
    for name in list(tensors):
        if not torch.isfinite(tensors[name]).all():
            raise _error(path_or_id, f"tensor {name} holds NaN or infinity", "Use an intact checkpoint.")
        cast = tensors.pop(name).to(device=device, dtype=dtype)
        if not torch.isfinite(cast).all():
            remedy = "Serve the model with --dtype bfloat16 or float32."
            raise _error(path_or_id, f"tensor {name} overflows {dtype}", remedy)
        tensors[name] = cast
    return Surrogate(config, tensors, digest)


def read_config(path_or_id: str) -> SurrogateConfig:
    """Read only `config.json` of a local folder or hub id: sizes and default threshold, without the weights.

    Raises SurrogateError when it is missing or wrong.
    """
    return _parse_config(_locate(path_or_id, [CONFIG_FILE]) / CONFIG_FILE, path_or_id)


def check_fits(config: SurrogateConfig, *, hidden_size: int, num_layers: int, num_kv_heads: int, source: str) -> None:
    """Raise SurrogateError, with both sets of numbers, unless the surrogate was made for these sizes.

    `num_kv_heads` counts the whole model (before tensor parallel); `source` is what the user gave.
    """
    theirs = (config.input_dim, config.n_modules, config.output_dim)
    ours = (hidden_size, num_layers, num_kv_heads)
    if theirs != ours:
        sizes = "hidden size {}, {} layers, {} KV heads".format
        raise _error(
            source,
            f"the surrogate was made for a model with {sizes(*theirs)}, but the model has {sizes(*ours)}",
            "Give the surrogate of this model, or calibrate one with `kvzap-sglang calibrate`.",
        )


def tensor_shapes(config: SurrogateConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint (kvpress' state dict), in layer order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(config.n_modules):
        if config.hidden_dim is None:
            shapes[f"layers.{i}.weight"] = (config.output_dim, config.input_dim)
            shapes[f"layers.{i}.bias"] = (config.output_dim,)
        else:
            shapes[f"layers.{i}.0.weight"] = (config.hidden_dim, config.input_dim)
            shapes[f"layers.{i}.0.bias"] = (config.hidden_dim,)
            shapes[f"layers.{i}.2.weight"] = (config.output_dim, config.hidden_dim)
            shapes[f"layers.{i}.2.bias"] = (config.output_dim,)
    return shapes


def _layer(config: SurrogateConfig) -> nn.Module:
    if config.hidden_dim is None:
        return nn.Linear(config.input_dim, config.output_dim)
    # The exact (erf) GELU: the tanh approximation moves scores across the threshold.
    return nn.Sequential(
        nn.Linear(config.input_dim, config.hidden_dim),
        nn.GELU(approximate="none"),
        nn.Linear(config.hidden_dim, config.output_dim),
    )


def _error(source: str, what: str, remedy: str) -> SurrogateError:
    # Messages of other libraries carry line breaks; a launch log wants one line.
    return SurrogateError(f"{_FLAG} {source}: {' '.join(what.split())[:600]}. {remedy}")


def _locate(source: str, files: list[str]) -> Path:
    """The local folder of a checkpoint whose `files` exist, downloaded if `source` is a hub id."""
    path = Path(source).expanduser()
    if path.is_file():
        raise _error(source, "this is a file", f"Give the folder with {CONFIG_FILE} and {WEIGHTS_FILE}.")
    local = path.is_dir()
    folder = path if local else _download(source, files)
    for name in files:
        if not (folder / name).is_file():
            raise _missing_file(source, folder, name, local)
    return folder


def _download(source: str, files: list[str]) -> Path:
    if not _HUB_ID.fullmatch(source) or source.startswith("."):
        remedy = f"Give a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a hub id (owner/name)."
        raise _error(source, "no such folder", remedy)
    try:
        return Path(snapshot_download(source, allow_patterns=files))
    except (OSError, ValueError, HTTPError) as error:
        # huggingface_hub's own errors derive from these. Its HTTP client's come through as they are, and which client
        # that is depends on its version: HTTPError is the base class of the one it uses.
        raise _error(
            source,
            f"no such folder, and the download of that hub id failed ({type(error).__name__}: {error})",
            "Correct the id, log in if it is gated, or download it elsewhere and give its local folder.",
        ) from error


def _missing_file(source: str, folder: Path, name: str, local: bool) -> SurrogateError:
    pickles = sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern))
    if name == WEIGHTS_FILE and pickles:
        return _error(
            source,
            f"no {WEIGHTS_FILE}, only {', '.join(pickles)}; a pickle can run code, so it is refused",
            f"Convert it to safetensors: safetensors.torch.save_file(state_dict, '{WEIGHTS_FILE}').",
        )
    place = "folder" if local else "hub repository (or its local cache)"
    return _error(source, f"the {place} has no {name}", _CHECK_REMEDY)


def _parse_config(path: Path, source: str) -> SurrogateConfig:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _error(source, f"{CONFIG_FILE} is not valid JSON ({error})", _CHECK_REMEDY) from error
    if not isinstance(raw, dict):
        raise _error(source, f"{CONFIG_FILE} is not a JSON object", _CHECK_REMEDY)
    if raw.get("model_type", "kvzap") != "kvzap":
        raise _error(
            source,
            f"{CONFIG_FILE} has model_type {raw['model_type']!r}, a surrogate has 'kvzap'",
            "Give the surrogate here; the model itself goes to --model-path.",
        )
    missing = [key for key in ("input_dim", "output_dim", "n_modules") if key not in raw]
    if missing:
        raise _error(source, f"{CONFIG_FILE} lacks {', '.join(missing)}", _CHECK_REMEDY)
    sizes = {key: _size(raw, key, source) for key in ("input_dim", "output_dim", "n_modules")}
    hidden = None if raw.get("hidden_dim") is None else _size(raw, "hidden_dim", source)
    return SurrogateConfig(**sizes, hidden_dim=hidden, default_threshold=_threshold(raw, source))


def _size(raw: dict[str, Any], key: str, source: str) -> int:
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        what = f"{CONFIG_FILE} has {key} = {value!r}, not a positive whole number"
        raise _error(source, what, _CHECK_REMEDY)
    return value


def _threshold(raw: dict[str, Any], source: str) -> float | None:
    value = raw.get("default_threshold")
    if value is None:
        return None
    # A whole number too large for a float makes isfinite raise, and is as useless as infinity.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(_as_float(value)):
        raise _error(
            source,
            f"{CONFIG_FILE} has default_threshold = {str(value)[:40]!r}, not a finite number",
            f"Remove the field from {CONFIG_FILE} and pass --kv-press-threshold.",
        )
    return float(value)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _read_tensors(folder: Path, config: SurrogateConfig, source: str) -> dict[str, Tensor]:
    """All tensors of the file, on the CPU, as stored; the header is checked before any is read."""
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt", device="cpu") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            header = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
            _check_header(header, config, source)
            return {name: file.get_tensor(name) for name in header}
    except (SafetensorError, OSError) as error:
        raise _error(source, f"{WEIGHTS_FILE} is truncated or corrupt ({error})", _CHECK_REMEDY) from error


def _check_header(header: _Header, config: SurrogateConfig, source: str) -> None:
    expected = tensor_shapes(config)
    kind = "linear" if config.hidden_dim is None else f"mlp with hidden_dim {config.hidden_dim}"
    remedy = f"Use the {CONFIG_FILE} and {WEIGHTS_FILE} of one and the same checkpoint."
    lacks, extra = expected.keys() - header.keys(), header.keys() - expected.keys()
    if lacks or extra:
        what = f"{WEIGHTS_FILE} does not hold a {kind} surrogate of {config.n_modules} layers"
        what += f": missing {_some(lacks)}" * bool(lacks) + f": unexpected {_some(extra)}" * bool(extra)
        raise _error(source, what, remedy)
    for name, (dtype, shape) in header.items():
        if dtype not in _FILE_DTYPES:
            what = f"tensor {name} has dtype {dtype}, not one of {', '.join(_FILE_DTYPES)}"
            raise _error(source, what, "Store the surrogate in float32, bfloat16 or float16.")
        if shape != expected[name]:
            what = f"tensor {name} has shape {list(shape)}, but {CONFIG_FILE} implies {list(expected[name])}"
            raise _error(source, what, remedy)


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _digest(config: SurrogateConfig, tensors: Mapping[str, Tensor]) -> str:
    # default_threshold is left out: the threshold in force is its own part of the press's identity.
    sizes = [config.input_dim, config.output_dim, config.hidden_dim, config.n_modules]
    digest = hashlib.sha256(json.dumps(sizes).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
