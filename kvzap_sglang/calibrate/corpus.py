"""Documents from text and JSONL files, cut to prompts, with whole documents held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvzap_sglang.calibrate.errors import CalibrationError

TEXT_ENDINGS = (".txt", ".md", ".rst")
MIN_TOKENS, MAX_TOKENS = 750, 1250  # both excluded: one length, so that softmax denominators are alike
_PROMPTS_PER_DOCUMENT = 4  # of a long document: the corpus should not be one book


@dataclass(frozen=True)
class Document:
    """A text and where it comes from. `document`: excerpts with the same one are held out together.

    `split`: "train", "held_out", or None to let the command choose.
    """

    text: str
    kind: str
    source: str
    licence: str
    document: str
    split: str | None = None


class Prompts(NamedTuple):
    """Texts of between 750 and 1250 tokens; no document is in both lists."""

    train: list[Document]
    held_out: list[Document]


def read_corpus(paths: Sequence[Path]) -> list[Document]:
    """Documents of text files, JSONL files (`{"text": ...}`, other fields of `Document` optional) and folders of both.

    A text file is a document; its kind is its folder's name. Raises CalibrationError.
    """
    documents = [document for path in paths for file in _files(path) for document in _read(file)]
    if not documents:
        endings = ", ".join((*TEXT_ENDINGS, ".jsonl"))
        raise CalibrationError(
            f"--corpus {' '.join(map(str, paths))}: no document in it. Give files that end in {endings}."
        )
    return documents


def cut_prompts(tokenizer: Any, documents: Sequence[Document], *, held_out: int, seed: int) -> Prompts:
    """Cut documents to prompts and hold out about `held_out` documents of each kind that says no split itself.

    Raises CalibrationError when too little is left to train on or to measure with.
    """
    train: dict[str, Document] = {}
    test: dict[str, Document] = {}
    chosen = _held_out_documents(documents, held_out, seed)
    for document in documents:
        into = test if (document.kind, document.document) in chosen else train
        for text in _excerpts(tokenizer, document.text):
            into.setdefault(_digest(text), Document(**{**document.__dict__, "text": text}))
    for digest in test.keys() & train.keys():  # one text under two names
        del train[digest]
    if len(train) < 2 or len(test) < 1:
        raise CalibrationError(
            f"--corpus: of {len(documents)} documents {len(train)} prompts to train on and {len(test)} to measure with are left. "
            f"Give more documents of more than {MIN_TOKENS} tokens, at least two to train on and one to hold out."
        )
    return Prompts(_shuffled(train, seed), _shuffled(test, seed))


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise CalibrationError(
            f"--corpus {path}: no such file or folder. Give text files, JSONL files or folders of them."
        )
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.suffix in (*TEXT_ENDINGS, ".jsonl"):
            yield file


def _read(file: Path) -> Iterator[Document]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"--corpus {file}: not UTF-8 text ({error}). Convert it or leave it out.") from error
    if file.suffix != ".jsonl":
        yield Document(text, file.parent.name, file.name, "unknown", str(file))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _parse(line, file, number)


def _parse(line: str, file: Path, number: int) -> Document:
    where = f"--corpus {file}, line {number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise CalibrationError(f"{where}: not JSON ({error}). Give one JSON object a line.") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise CalibrationError(f'{where}: no "text". Give objects such as {{"text": "...", "kind": "prose"}}.')
    split = row.get("split")
    if split not in (None, "train", "held_out"):
        raise CalibrationError(f'{where}: "split" is {split!r}. Give "train", "held_out" or leave it out.')
    kind, source = str(row.get("kind", file.stem)), str(row.get("source", file.name))
    document = str(row.get("document", f"{file}:{number}"))
    return Document(row["text"], kind, source, str(row.get("licence", "unknown")), document, split)


def _held_out_documents(documents: Sequence[Document], count: int, seed: int) -> set[tuple[str, str]]:
    """(kind, document) of those held out: those that say so, else the first `count` of a seeded order of each kind."""
    named = {(d.kind, d.document) for d in documents if d.split == "held_out"}
    free: dict[str, set[str]] = {}
    for document in documents:
        if document.split is None:
            free.setdefault(document.kind, set()).add(document.document)
    for kind, names in free.items():
        order = sorted(names, key=lambda name: _digest(f"{seed} {name}"))
        # At least one, and never more than a third: a small corpus should still train.
        named |= {(kind, name) for name in order[: max(1, min(count, len(order) // 3))]}
    return named


def _excerpts(tokenizer: Any, text: str) -> Iterator[str]:
    """Pieces of `text` with the wanted number of tokens; a text that has it already is one."""
    text = text.strip()
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if MIN_TOKENS < len(offsets) < MAX_TOKENS:
        yield text
        return
    aim = (MIN_TOKENS + MAX_TOKENS) // 2
    pieces = len(offsets) // aim if len(offsets) > MAX_TOKENS else 0
    used = min(pieces, _PROMPTS_PER_DOCUMENT)
    for index in range(used):
        first = (index * pieces // used) * aim
        begin, end = offsets[first][0], offsets[min(first + aim, len(offsets)) - 1][1]
        piece = text[begin:end].strip()
        # A cut may merge or split a token at either end.
        if MIN_TOKENS < len(tokenizer(piece, add_special_tokens=False)["input_ids"]) < MAX_TOKENS:
            yield piece


def _shuffled(prompts: dict[str, Document], seed: int) -> list[Document]:
    return [prompts[digest] for digest in sorted(prompts, key=lambda digest: _digest(f"{seed} {digest}"))]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
