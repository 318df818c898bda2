"""`python -O` strips asserts: nothing that keeps memory right may be one, and the tests must still test."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.planted import PLANTED, outcome

ROOT = Path(__file__).parents[1]
PRODUCT = sorted(
    path
    for folder in ("kvzap_sglang", "kernels", "cpu", "benchmarks", "examples", "scripts")
    for path in (ROOT / folder).rglob("*.py")
    if "build" not in path.parts
)


def optimised(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`python -O arguments...` from `cwd`, importing this checkout."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cpu")])}
    command = [sys.executable, "-O", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def stripped() -> dict[str, Any]:
    """What the planted faults raise in a process without asserts."""
    done = optimised("-m", "tests.planted")
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_seen_without_asserts(name: str, stripped: dict[str, Any]) -> None:
    plant, expected = PLANTED[name]
    assert stripped["debug"] is False
    assert stripped[name] == expected.__name__ == outcome(plant)


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_product_asserts_nothing(path: Path) -> None:
    tree = ast.walk(ast.parse(path.read_text()))
    lines = [n.lineno for n in tree if isinstance(n, ast.Assert) or (isinstance(n, ast.Name) and n.id == "__debug__")]
    assert not lines, f"{path}: python -O strips lines {lines}"


def test_tests_and_their_helpers_still_fail_without_asserts(tmp_path: Path) -> None:
    """pytest rewrites asserts into raises, in tests by itself and in our helpers because `tests` registers them."""
    path = tmp_path / "test_canary.py"
    path.write_text(
        "from tests.compare import assert_same_generation\n"
        "def answer(token): return {'output_ids': [token], 'meta_info':\n"
        "    {'output_token_logprobs': [[0.0]], 'output_top_logprobs': [[[0.0], [-9.0]]]}}\n"
        "def test_own(): assert 1 == 2\n"
        "def test_helper(): assert_same_generation(answer(1), answer(2), tolerance=1.0)\n"
        "def test_that_passes(): assert_same_generation(answer(1), answer(1), tolerance=1.0)\n"
    )
    done = optimised("-m", "pytest", "-q", "-p", "no:cacheprovider", str(path), cwd=tmp_path)
    assert "2 failed, 1 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
