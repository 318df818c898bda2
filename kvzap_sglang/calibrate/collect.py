"""Pairs of a layer's input and its target, one file a prompt, so that a run can be taken up again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from kvzap_sglang.calibrate.corpus import Document
from kvzap_sglang.calibrate.prompts import repeat_prompt
from kvzap_sglang.calibrate.targets import record


@dataclass(frozen=True)
class CollectSettings:
    """What decides a prompt's file. `model_digest`: of weights and config. `tokens`: positions taken of each prompt."""

    model_digest: str
    dtype: str
    plus: bool
    tokens: int
    seed: int

    def file_name(self, text: str) -> str:
        settings = f"{self.model_digest} {self.dtype} {self.plus} {self.tokens} {self.seed}"
        return hashlib.sha256(f"{settings}\n{text}".encode()).hexdigest()[:32] + ".safetensors"


class Collected:
    """The pairs of some prompts, read one layer at a time.

    Files hold `hidden.{l}`, bfloat16 `[t, D]` (what a served bf16 model shows its surrogate), and `targets`, float32 `[t, L, H]`.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def prompts(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs bfloat16 `[t, D]` and targets float32 `[t, H]` of one layer, prompt by prompt."""
        for file in self.files:
            with safe_open(file, framework="pt") as opened:
                yield opened.get_tensor(f"hidden.{layer}"), opened.get_slice("targets")[:, layer]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs bfloat16 `[N, D]` and targets float32 `[N, H]` of one layer, prompt after prompt."""
        hidden, targets = zip(*self.prompts(index), strict=True)
        return torch.cat(hidden), torch.cat(targets)

    def counts(self) -> list[int]:
        """Pairs of each prompt."""
        counts = []
        for file in self.files:
            with safe_open(file, framework="pt") as opened:
                counts.append(opened.get_slice("targets").get_shape()[0])
        return counts


def collect(
    model: Any, tokenizer: Any, documents: Sequence[Document], folder: Path, settings: CollectSettings, *, label: str
) -> Collected:
    """Run every prompt whose file is not there yet, with a progress bar; one prompt is in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / settings.file_name(document.text) for document in documents]
    missing = [(document, file) for document, file in zip(documents, files, strict=True) if not _is_whole(file)]
    for document, file in tqdm(missing, desc=label, unit="prompt"):
        _write(file, _pairs(model, tokenizer, document.text, settings))
    return Collected(files)


def _pairs(model: Any, tokenizer: Any, text: str, settings: CollectSettings) -> dict[str, Tensor]:
    prompt = repeat_prompt(tokenizer, text)
    seen = record(model, prompt, settings.plus)
    generator = torch.Generator().manual_seed(settings.seed)
    chosen = torch.randperm(len(prompt.context), generator=generator)[: settings.tokens].sort().values
    targets = torch.stack(seen.targets, dim=1).cpu()[chosen]
    hidden = {
        f"hidden.{index}": layer.cpu()[chosen].to(torch.bfloat16).contiguous()
        for index, layer in enumerate(seen.hidden)
    }
    return {**hidden, "targets": targets.contiguous()}


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    partial = file.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, file)


def _is_whole(file: Path) -> bool:
    try:
        with safe_open(file, framework="pt") as opened:
            return "targets" in opened.keys()  # noqa: SIM118 (not a dict)
    except (FileNotFoundError, SafetensorError):
        return False  # collected again
