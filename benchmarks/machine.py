"""Naming the machine that a figure comes from."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_machine(threads: int) -> str:
    """Processor, its vector extensions that matter here, cores, threads used."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", "").split()
    vectors = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if name in flags]
    name = facts.get("model name", platform.processor() or platform.machine())
    return f"{name}, {os.cpu_count()} cores, {'/'.join(vectors) or 'no vectors'}, {threads} threads"
