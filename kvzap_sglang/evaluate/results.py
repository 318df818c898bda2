"""Answers on disk, one JSON object a line: written as they come, read again when a run is taken up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from kvzap_sglang.evaluate.errors import EvaluationError

FULL = "full"  # label of the full cache
ANSWERS_FILE = "answers.jsonl"
SETTINGS_FILE = "settings.json"


@dataclass(frozen=True)
class Setting:
    """What a cell of the grid is, apart from the example. `method`: a label. `prefill`: "dense" or "sparse". `decode`: what

    becomes of generated tokens, "prune" or "keep". Both are "" for the full cache. `reuse`: "hit", "branch" or "cold".
    """

    method: str
    prefill: str
    decode: str
    reuse: str

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.method, self.prefill, self.decode, self.reuse)))

    @property
    def full(self) -> Setting:
        """The full cache's, which is the same however a server prunes."""
        return Setting(FULL, "", "", self.reuse)


@dataclass(frozen=True)
class Row:
    """One answer. `removed`: fraction of the context's pairs that were pruned when its questions began (cold: of all

    pairs at the end). `context`: index that examples of one context share. `kl`: nats, of task `own` only.
    """

    key: str
    task: str
    length: int
    setting: Setting
    context: str
    context_tokens: int
    answer: str
    score: float
    removed: float
    cached_tokens: int
    prompt_tokens: int
    depth: float | None
    output_ids: Sequence[int]
    kl: float | None = None


class Results:
    """The answers in `folder`, made with `settings`.

    `surrogates`: digests by the names that methods are labelled with. `examples`: digests by key. Later runs may add others
    of both. Raises EvaluationError when the folder holds answers of other settings, or of another surrogate or example of
    the same name.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any], surrogates: Mapping[str, str], examples: Mapping[str, str]
    ) -> None:
        self._file = folder / ANSWERS_FILE
        self._lock = Lock()
        if folder.exists() and not folder.is_dir():
            raise EvaluationError(f"--out {folder}: this is a file. Give a folder.")
        digests = {"surrogates": surrogates, "examples": examples}
        before = _written(folder, settings, digests)
        joined = settings | {kind: {**before.get(kind, {}), **named} for kind, named in digests.items()}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SETTINGS_FILE).write_text(json.dumps(joined, indent=1, sort_keys=True) + "\n")
        self.rows = list(_read(self._file))
        self._known = {(row.setting, row.key) for row in self.rows}

    def has(self, setting: Setting, key: str) -> bool:
        return (setting, key) in self._known

    def of(self, setting: Setting) -> list[Row]:
        return [row for row in self.rows if row.setting == setting]

    def add(self, row: Row) -> None:
        """Append; may be called from several threads."""
        with self._lock:
            self.rows.append(row)
            self._known.add((row.setting, row.key))
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")


def _written(
    folder: Path, settings: dict[str, Any], digests: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, str]]:
    """Digests of the folder's answers, if it holds any, by kind and name."""
    file = folder / SETTINGS_FILE
    if not file.is_file():
        return {}
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        known = {kind: dict(before.pop(kind)) for kind in digests}
    except (ValueError, KeyError, TypeError) as error:
        raise EvaluationError(f"--out {folder}: {SETTINGS_FILE} is damaged ({error}). Give another folder.") from error
    if before != settings:
        raise EvaluationError(
            f"--out {folder}: holds answers of other settings (see {SETTINGS_FILE}). Give another folder."
        )
    for kind, named in digests.items():
        for name, digest in named.items():
            if known[kind].get(name, digest) != digest:
                raise EvaluationError(
                    f"--out {folder}: holds answers of other {kind}, {name} is not the same. Give another folder."
                )
    return known


def _read(file: Path) -> list[Row]:
    """Rows of the file; a last line that was cut short is cut off, since the next one is written after it."""
    if not file.is_file():
        return []
    *whole, rest = file.read_bytes().split(b"\n")
    if rest:
        file.write_bytes(b"".join(line + b"\n" for line in whole))
    rows = [json.loads(line) for line in whole]
    return [Row(**{**row, "setting": Setting(**row["setting"])}) for row in rows]
