"""What a surrogate was made of: the first half of its `calibration.json`."""

from __future__ import annotations

import argparse
import hashlib
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from kvzap_sglang.calibrate.collect import CollectSettings
from kvzap_sglang.calibrate.corpus import Document, Prompts
from kvzap_sglang.calibrate.train import MlpSettings


def provenance(
    settings: CollectSettings, mlp: MlpSettings, args: argparse.Namespace, prompts: Prompts, pairs: dict[str, int]
) -> dict[str, Any]:
    """Base model, target, seeds, versions and corpus with licences. `pairs`: per head, training and held out."""
    return {
        "base_model": {"name": Path(args.model).name, "digest": settings.model_digest},
        "target": {"score": args.target, "dtype": settings.dtype, "tokens_per_prompt": settings.tokens},
        "mlp": asdict(mlp),
        "seed": settings.seed,
        "pairs_per_head": pairs,
        "corpus": {"train": _sources(prompts.train), "held_out": _sources(prompts.held_out)},
        "made_with": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def _sources(documents: Sequence[Document]) -> dict[str, Any]:
    counted = Counter((d.kind, d.source, d.licence) for d in documents)
    texts = hashlib.sha256("".join(sorted(d.text for d in documents)).encode()).hexdigest()
    names = ("kind", "source", "licence")
    sources = [{**dict(zip(names, key, strict=True)), "prompts": count} for key, count in sorted(counted.items())]
    return {"prompts": len(documents), "sha256": texts, "sources": sources}
