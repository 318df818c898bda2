"""Built distributions hold every source file of the tree, and nothing that shadows another package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".cpp", ".h", ".pth")
BUILD = """
import importlib, sys
backend, kind, out = sys.argv[1:]
print(getattr(importlib.import_module(backend), f"build_{kind}")(out))
"""


def build(backend: str, kind: str, source: Path, out: Path) -> Path:
    """Let a build backend make a "wheel" or an "sdist" of `source`, as pip does. What it printed is the error."""
    command = [sys.executable, "-c", BUILD, backend, kind, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.splitlines()[-1]


def sources(folder: Path, prefix: str = "") -> set[str]:
    """The source files below `folder`, links not followed."""
    return {f"{prefix}{path.relative_to(folder).as_posix()}" for path in folder.rglob("*") if path.suffix in SUFFIXES}


def expected(distribution: str) -> set[str]:
    """The names that a wheel must hold."""
    if distribution == "cpu":
        return sources(REPOSITORY / "cpu") - {"hatch_build.py"}
    return sources(REPOSITORY / "kvzap_sglang", "kvzap_sglang/") | sources(
        REPOSITORY / "kernels", "kvzap_sglang/kernels/"
    )


def copy(distribution: str, target: Path) -> Path:
    """What belongs to the distribution, without earlier builds: their leftovers would end up in ours."""
    root = REPOSITORY / distribution
    names = [path.name for path in root.iterdir()] if distribution == "cpu" else ["kvzap_sglang", "kernels"]
    target.mkdir()
    for name in {*names, "pyproject.toml", "README.md"}:
        if (root / name).is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(root / name, target / name, symlinks=True, ignore=skip)
        else:
            shutil.copy(root / name, target / name)
    shutil.copy(REPOSITORY / "LICENSE", target)
    return target


@pytest.mark.parametrize("through_sdist", [False, True], ids=["tree", "sdist"])
@pytest.mark.parametrize(("distribution", "backend"), [(".", "setuptools.build_meta"), ("cpu", "hatchling.build")])
def test_a_wheel_holds_every_source_file(tmp_path: Path, distribution: str, backend: str, through_sdist: bool) -> None:
    pytest.importorskip(backend, reason=f"{backend} is missing: pip install -r requirements/dev.txt")
    source = copy(distribution, tmp_path / "source")
    if through_sdist:
        archive = build(backend, "sdist", source, tmp_path)
        with tarfile.open(archive) as file:
            file.extractall(tmp_path / "unpacked", filter="data")
        [source] = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build(backend, "wheel", source, tmp_path)) as wheel:
        found = {name for name in wheel.namelist() if name.endswith(SUFFIXES)}
    assert found == expected(distribution)
