"""Every Triton kernel compiles for sm_80, sm_90a and sm_100a, without spills where that matters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(1200)
def test_every_kernel_compiles_and_does_not_spill() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kvzap_sglang.kernels.triton.cross_compile"]
    env |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    compiled = {line.split(" | ")[0].removeprefix("| ") for line in done.stdout.splitlines()}
    assert compiled >= {name.strip("_") for name in kernel_names()} and len(kernel_names()) >= 11


def kernel_names() -> set[str]:
    """Every function under `kernels/triton` whose name says that it is launched."""
    sources = (path.read_text() for path in (ROOT / "kernels" / "triton").glob("*.py"))
    return {name for source in sources for name in re.findall(r"@triton\.jit\ndef (_\w+_kernel)\(", source)}
