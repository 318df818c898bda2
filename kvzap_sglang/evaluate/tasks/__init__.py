"""What is asked. One file a family; here are their names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvzap_sglang.evaluate.errors import EvaluationError
from kvzap_sglang.evaluate.tasks import aime25, longbench, own, paragraphs
from kvzap_sglang.evaluate.tasks.base import Sizes, Task
from kvzap_sglang.evaluate.tasks.needles import MULTI_KEY, MULTI_QUERY, MULTI_VALUE, SINGLE
from kvzap_sglang.evaluate.tasks.tracking import TRACKING
from kvzap_sglang.evaluate.tasks.words import COMMON_WORDS, FREQUENT_WORDS

__all__ = ["GENERATED", "Sizes", "Task", "TaskFiles", "find_task"]

GENERATED: dict[str, Task] = {
    task.name: task for task in (SINGLE, MULTI_KEY, MULTI_VALUE, MULTI_QUERY, TRACKING, COMMON_WORDS, FREQUENT_WORDS)
}
_FROM_FILES = ("qa", "longbench:SET", "aime25", "own")


@dataclass(frozen=True)
class TaskFiles:
    """Where the tasks that are not generated read; None where the flag was not given. `new_tokens`: of `own`, `aime25`.

    `longest`: tokens of a LongBench context.
    """

    qa: Path | None = None
    longbench: Path | None = None
    aime25: Path | None = None
    own: Path | None = None
    new_tokens: int | None = None
    longest: int | None = None


def find_task(name: str, files: TaskFiles) -> Task:
    """Raises EvaluationError for an unknown name or a missing file."""
    if name in GENERATED:
        return GENERATED[name]
    family, _, part = name.partition(":")
    if family == "qa":
        return paragraphs.Paragraphs(_given(name, paragraphs.FLAG, files.qa))
    if family == "longbench":
        return longbench.LongBench(_given(name, longbench.FLAG, files.longbench), part, files.longest)
    if family == "aime25":
        return aime25.Aime25(_given(name, aime25.FLAG, files.aime25), files.new_tokens or 32000)
    if family == "own":
        return own.Own(_given(name, own.FLAG, files.own), files.new_tokens or 64)
    raise EvaluationError(f"--task {name}: unknown. Known are {', '.join([*GENERATED, *_FROM_FILES])}.")


def _given(task: str, flag: str, path: Path | None) -> Path:
    if path is None or not path.exists():
        said = "is missing" if path is None else f"{path} does not exist"
        raise EvaluationError(f"--task {task} reads {flag}, which {said}. Give the path of a local copy.")
    return path
