"""Compiles the C++ kernels of this directory once per machine and loads them.

The library has a plain C interface and no torch headers, so a build takes seconds. It is cached under
`$XDG_CACHE_HOME/kvzap_sglang` (`~/.cache/kvzap_sglang`), named by a hash of everything that decides its content.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
_COMMON = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno")
_ISA_FLAGS = {
    "isa_avx2.cpp": ("-mavx2", "-mfma"),
    "isa_avx512.cpp": ("-mavx512f", "-mavx2", "-mfma"),
}
_BUILD_TIMEOUT_S = 300
_lock = threading.Lock()
_failures: list[str] = []


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message says why."""


def compiler() -> list[str]:
    """Command of the C++ compiler: `$CXX` if set, else `g++` or `c++`. Raises BuildError if there is none."""
    candidates = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [["g++"], ["c++"]]
    for command in candidates:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler found (tried {', '.join(c[0] for c in candidates)}; set CXX)")


def loaded_openmp() -> str | None:
    """File of the OpenMP runtime this process already has (torch's), or None.

    Linking against that very file makes torch and the kernels share one thread pool. A wheel's copy may carry another
    soname than the system's, and two pools of spinning threads would compete for the same cores.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux: let -fopenmp choose
        return None
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
            return path
    return None


def sources() -> list[Path]:
    """The `.cpp` files to compile on this machine's architecture."""
    on_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return [p for p in sorted(SOURCE_DIR.glob("*.cpp")) if on_x86 or p.name not in _ISA_FLAGS]


def cache_dir() -> Path:
    """Directory of compiled kernels; not created."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvzap_sglang"


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def _fingerprint(command: list[str], openmp: str | None) -> str:
    content = hashlib.sha256()
    version = _run([*command, "--version"])
    for part in (*command, version, platform.machine(), openmp or "", repr(_COMMON), repr(_ISA_FLAGS)):
        content.update(part.encode() + b"\0")
    for path in sorted((*sources(), *SOURCE_DIR.glob("*.h"))):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:20]


def _compile(command: list[str], openmp: str | None, out: Path) -> None:
    units = {source: str(out.with_name(source.stem + ".o")) for source in sources()}

    def compile_unit(source: Path) -> str:
        flags = [*_COMMON, *_ISA_FLAGS.get(source.name, ())]
        return _run([*command, *flags, "-c", str(source), "-o", units[source]])

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as workers:
        for _ in workers.map(compile_unit, units):  # the loop raises what a worker raised
            continue
    _run([*command, "-shared", *units.values(), *([openmp] if openmp else ["-fopenmp"]), "-o", str(out)])


def _install(built: Path, cached: Path) -> Path:
    """Move a library into the cache; another process may do the same at the same time. Returns the file to load."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=cached.parent, prefix=cached.stem, suffix=".partial")
        os.close(handle)
        shutil.copyfile(built, partial)
        os.chmod(partial, 0o755)
        os.replace(partial, cached)  # atomic: a reader sees no library or a whole one
    except OSError as error:
        logger.warning("cannot keep the compiled CPU kernels in %s: %s", cached.parent, error)
        return built
    return cached


def _load() -> ctypes.CDLL:
    command, openmp = compiler(), loaded_openmp()
    cached = cache_dir() / f"kernels-{_fingerprint(command, openmp)}.so"
    if cached.exists():
        return ctypes.CDLL(str(cached))
    logger.info("building the CPU kernels once with %s, into %s", command[0], cached)
    with tempfile.TemporaryDirectory(prefix="kvzap_sglang_") as scratch:
        built = Path(scratch) / "kernels.so"
        _compile(command, openmp, built)
        return ctypes.CDLL(str(_install(built, cached)))  # stays mapped if `scratch` held it


@lru_cache(maxsize=1)
def _load_or_warn() -> ctypes.CDLL | None:
    try:
        return _load()
    except (BuildError, OSError) as error:
        _failures.append(str(error))
        logger.warning("CPU attention falls back to plain torch, which is several times slower: %s", error)
        return None


def library() -> ctypes.CDLL | None:
    """The compiled kernels, built on first use; None, after one warning with the reason, where that fails."""
    with _lock:
        return _load_or_warn()


def failure() -> str:
    """Why `library()` is None; empty where it is not, or was not asked for yet."""
    return _failures[-1] if _failures else ""


def forget() -> None:
    """Drop the loaded library, so that the next use builds or loads it again (tests)."""
    with _lock:
        _failures.clear()
        _load_or_warn.cache_clear()
