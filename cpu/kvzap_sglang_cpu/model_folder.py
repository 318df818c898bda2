"""Write a model folder so that a reader never sees half of one."""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

REQUIRED_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds every non-empty file that SGLang needs to serve it."""
    return all((folder / name).is_file() and (folder / name).stat().st_size > 0 for name in REQUIRED_FILES)


def write_model_folder(target: Path, write: Callable[[Path], None]) -> bool:
    """Fill a temporary folder beside `target` with `write(folder)`, then rename it to `target`.

    Returns False, without calling `write`, when `target` is already complete. An incomplete `target` is replaced.
    Raises RuntimeError when `write` returns without having written all of REQUIRED_FILES; `target` is then as before.
    """
    if is_complete(target):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write(scratch)
        if not is_complete(scratch):
            missing = [name for name in REQUIRED_FILES if not (scratch / name).is_file()]
            raise RuntimeError(f"{target.name}: the writer left out {missing or 'the contents of a file'}")
        scratch.chmod(0o755)  # mkdtemp's 0700 and safetensors' 0600 would hide the model from other users' servers
        for file in scratch.iterdir():
            file.chmod(0o644)
        return _publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def pending(out: Path, names: Iterable[str]) -> list[str]:
    """Those of `names` whose folders under `out` are not complete."""
    return [name for name in names if not is_complete(out / name)]


def command_line(
    description: str, names: Iterable[str], write: Callable[[Path], list[Path]], argv: list[str] | None
) -> None:
    """The command of a converter: `write` what is missing of `names` under --out and say what was done."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path("models"), help="folder of the model folders")
    out: Path = parser.parse_args(argv).out
    start = time.monotonic()
    written = write(out)
    for name in names:
        print(f"{out / name}: {'written' if out / name in written else 'already there'}")
    print(f"{time.monotonic() - start:.1f} s")


def _publish(scratch: Path, target: Path) -> bool:
    if target.exists() and not is_complete(target):
        shutil.rmtree(target)
    try:
        os.rename(scratch, target)
    except OSError:
        # Another process that converted the same model at the same time has won: its folder is as good as ours.
        if is_complete(target):
            return False
        raise
    return True
