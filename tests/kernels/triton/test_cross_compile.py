"""Every Triton kernel compiles for sm_80, sm_90a and sm_100a, without spills where that matters."""

from __future__ import annotations

import os
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
    for kernel in ("chunk_kernel", "merge_kernel", "extend_kernel", "visible_kernel", "write_kernel"):
        assert f"| {kernel} |" in done.stdout
