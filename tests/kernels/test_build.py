"""Compiling, caching, choosing the instruction set, and doing without a compiler."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kvzap_sglang.kernels import reference
from kvzap_sglang.kernels.cpu import build, describe, native

from . import oracle

COMPILED = pytest.mark.skipif(build.library() is None, reason=f"the kernels do not compile here: {build.failure()}")


UNOPTIMISED = tuple("-O0" if flag == "-O3" else flag for flag in build._COMMON)  # where only the machinery is tested


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is loaded when the test starts, and nothing of it stays loaded."""
    build.forget()
    native.isa_level.cache_clear()
    yield
    build.forget()
    native.isa_level.cache_clear()


def check_fallback_equals_reference(rng: torch.Generator) -> None:
    table = torch.arange(120, dtype=torch.int32).view(40, 3)
    arguments = (table, torch.arange(40), torch.tensor([0, 15, 40]), torch.tensor([0, 0]))
    visible = native.visible_cells(*arguments, detail=True)
    expected = reference.visible_cells(*arguments, detail=True)
    assert all(torch.equal(a, b) for a, b in zip(visible, expected, strict=True))
    rows = torch.randn(40, 3, 64, generator=rng)
    k_pool, v_pool = torch.zeros(120, 64), torch.zeros(120, 64)
    native.write_cells(table, torch.arange(40), rows, rows + 1, k_pool, v_pool)
    assert torch.equal(k_pool, rows.view(120, 64)) and torch.equal(v_pool, rows.view(120, 64) + 1)
    q = torch.randn(2, 9, 64, generator=rng)
    out, lse = native.ragged_decode(q, k_pool, v_pool, visible, 0.125)
    bounds = visible.indptr.tolist()
    lists = [visible.cells[a:b].tolist() for a, b in pairwise(bounds)]
    expected_out, expected_lse = oracle.decode(q, k_pool, v_pool, lists, 0.125)
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_without_compiler_warns_once_and_gives_the_same(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rng: torch.Generator
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        check_fallback_equals_reference(rng)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "falls back to plain torch" in warnings[0] and "no C++ compiler" in warnings[0]
    assert "plain torch" in describe() and "no C++ compiler" in describe()
    with pytest.raises(RuntimeError, match="not compiled"):
        native.read_rows(torch.zeros(1, 16), torch.zeros(1, 16), oracle.ragged([[0]]))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('[ "$1" = --version ] && exit 0\necho "ragged.cpp:1: no such thing" >&2\nexit 1', "no such thing"),
        ("exit 3", "--version failed"),
        (
            '[ "$1" = --version ] && exit 0\nfor o; do :; done\necho not a library > "$o"',
            "invalid ELF header|too short",
        ),
    ],
    ids=["compile error", "broken compiler", "unloadable result"],
)
def test_failing_compiler_falls_back_with_the_reason(
    script: str,
    reason: str,
    fresh: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rng: torch.Generator,
) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        check_fallback_equals_reference(rng)
    assert caplog.records[-1].levelno == logging.WARNING
    assert re.search(reason, caplog.text)


@COMPILED
def test_unwritable_cache_is_survived(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("where the cache directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(build, "_COMMON", UNOPTIMISED)
    with caplog.at_level(logging.INFO):
        assert build.library() is not None
    assert "building the CPU kernels once" in caplog.text
    assert "cannot keep the compiled CPU kernels" in caplog.text
    out, _ = native.ragged_decode(
        torch.zeros(1, 1, 16), torch.ones(1, 16), torch.ones(1, 16), oracle.ragged([[0]]), 1.0
    )
    assert (out == 1).all()


@COMPILED
def test_two_processes_build_at_once_and_a_third_reuses(tmp_path: Path) -> None:
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO)\n"
        f"sys.path.insert(0, {str(build.SOURCE_DIR)!r}); import build\n"  # alone, for it needs no torch
        f"build._COMMON = {UNOPTIMISED}\n"
        "print(build.library().kvzap_best_isa())"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    for process in [start(), start()]:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0 and out.strip() in "012", errors
        assert "building the CPU kernels once" in errors
    libraries = list((tmp_path / "kvzap_sglang").iterdir())
    assert [path.suffix for path in libraries] == [".so"]
    process = start()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and "building" not in errors


@COMPILED
@pytest.mark.parametrize(("wanted", "message"), [("sse9", "this host has generic"), ("AVX2", "this host has generic")])
def test_unknown_instruction_set_is_refused(wanted: str, message: str, choose_isa) -> None:
    choose_isa(wanted)
    with pytest.raises(ValueError, match=message):
        native.isa_level()


@COMPILED
def test_instruction_set_beyond_the_host_is_refused(choose_isa, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build.library()
    monkeypatch.setattr(library, "kvzap_best_isa", lambda: 1)
    choose_isa("avx512")
    with pytest.raises(ValueError, match=r"this host has generic, avx2$"):
        native.isa_level()
    choose_isa("")
    assert native.isa_level() == 1


@COMPILED
def test_shares_the_openmp_runtime_of_torch() -> None:
    native.ragged_decode(torch.zeros(1, 1, 16), torch.ones(1, 16), torch.ones(1, 16), oracle.ragged([[0]]), 1.0)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc/self/maps to look at")
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line or "libomp" in line}
    assert len(runtimes) == 1, runtimes
