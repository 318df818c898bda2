"""What the benchmarks that start servers have in common: options and press flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvzap_sglang.surrogates import shipped_surrogate


def server_parser(description: str | None, *, dtype: str) -> argparse.ArgumentParser:
    """Options of every benchmark of servers. dtype: the default."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0] if description else None)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--surrogate", default=str(shipped_surrogate("mlp")))
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--threshold", default="-3")
    parser.add_argument("--dtype", default=dtype, help="processors without bf16 arithmetic emulate bfloat16 slowly")
    parser.add_argument("--skip-stock", action="store_true")
    return parser


def press_flags(surrogate: str, threshold: str) -> tuple[str, ...]:
    return ("--kv-press", "kvzap", "--kv-press-model", surrogate, f"--kv-press-threshold={threshold}")
