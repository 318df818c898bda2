"""Rows of a user's files, with errors that name the flag."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvzap_sglang.evaluate.errors import EvaluationError


def read_rows(flag: str, file: Path, needed: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Objects of a JSONL file that have the `needed` fields. Raises EvaluationError."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{flag} {file}: cannot be read ({error}). Give a JSONL file.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise EvaluationError(
                f"{flag} {file}, line {number}: not JSON ({error}). Give one object a line."
            ) from error
        if not isinstance(row, dict):
            raise EvaluationError(f"{flag} {file}, line {number}: not a JSON object. Give one object a line.")
        missing = [name for name in needed if name not in row]
        if missing:
            raise EvaluationError(
                f"{flag} {file}, line {number}: no {', '.join(missing)}. Each row needs {', '.join(needed)}."
            )
        yield row


def read_object(flag: str, file: Path) -> dict[str, Any]:
    """A JSON object. Raises EvaluationError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{flag}: {file} cannot be read ({error}). Give a copy of the official files.") from error
    if not isinstance(value, dict):
        raise EvaluationError(f"{flag}: {file} is not a JSON object. Give a copy of the official files.")
    return value
