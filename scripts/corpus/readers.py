"""From a package's file to the text that one would paste into a prompt."""

from __future__ import annotations

import ast
import gzip
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import yaml

_SKIPPED = {"script", "style", "nav", "head", "button", "svg"}
_BLOCKS = {"p", "div", "h1", "h2", "h3", "h4", "pre", "table", "ul", "ol", "section", "dl"}
_LINES = {"li", "br", "tr", "dt", "dd"}
# Of some five hundred: those in which more than a few people write to language models, one script after another.
_LANGUAGE_CODES = """
fra deu_1996 spa ita por_PT por_BR nld_2 pol rus ces swe dan fin hun ron_2006 tur ell_monotonic ukr cmn_hans jpn
kor arb heb hin vie ind cat glg eus lat epo isl gle cym est lav lit slk slv hrv bul nob afr swh tgl zlm ben fas
tam tha urd
"""
_LANGUAGES = frozenset(_LANGUAGE_CODES.split())


class Text(NamedTuple):
    """`document`: distinguishes texts of one file; "" where there is one."""

    document: str
    text: str


def plain(file: Path) -> Iterator[Text]:
    yield Text("", file.read_text(encoding="utf-8"))


def code(file: Path) -> Iterator[Text]:
    """The file without the comment it starts with, which is a licence more often than not."""
    text = file.read_text(encoding="utf-8")
    yield Text("", re.sub(r"\A\s*(/\*.*?\*/|((//|#)[^\n]*\n)+)", "", text, flags=re.DOTALL).lstrip())


def json_text(file: Path) -> Iterator[Text]:
    """`{"title" or "name", "text"}`, of which long texts are one line."""
    row = json.loads(file.read_text(encoding="utf-8"))
    sentences = re.split(r"(?<=[.?!]) +(?=[A-Z\"“])", row["text"])
    paragraphs = [" ".join(sentences[start : start + 6]) for start in range(0, len(sentences), 6)]
    yield Text("", "\n\n".join([str(row.get("title") or row["name"]), *paragraphs]))


def factbook(file: Path) -> Iterator[Text]:
    """A country's entries as headed paragraphs."""
    yield Text("", "\n\n".join(_entries(json.loads(file.read_text(encoding="utf-8")), [])))


def _entries(value: dict[str, Any], path: list[str]) -> Iterator[str]:
    for name, entry in value.items():
        if not isinstance(entry, dict):
            continue
        text = entry.get("text")
        if isinstance(text, str):
            yield f"{': '.join([*path[-1:], name])}: {re.sub('<[^>]+>', ' ', text).strip()}"
        else:
            yield from _entries(entry, [*path, name])


def dictionary(file: Path) -> Iterator[Text]:
    """A dictd database: entries are unindented lines followed by indented ones; forty entries make a document."""
    lines = gzip.decompress(file.read_bytes()).decode("utf-8", errors="replace")
    blocks = [block.strip("\n") for block in re.split(r"\n(?=\S)", lines) if len(block) > 200]
    for start in range(10, len(blocks) - 40, 40):  # the first ones are about the file
        yield Text(str(start), "\n\n".join(blocks[start : start + 40]))


def docstrings(file: Path) -> Iterator[Text]:
    """The docstrings of a module that are long enough to explain something."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    yield Text("", "\n\n".join(text for text in texts if len(text) > 400))


def conversations(file: Path) -> Iterator[Text]:
    """ChatterBot's turns."""
    rows = yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]
    turns = ["\n".join(f"{'AB'[i % 2]}: {str(turn).strip()}" for i, turn in enumerate(row)) for row in rows]
    yield Text("", "\n\n".join(turns))


def declarations(file: Path) -> Iterator[Text]:
    if file.stem in _LANGUAGES:
        yield from html(file)


def html(file: Path) -> Iterator[Text]:
    """The text of a page's body."""
    parser = _Page()
    parser.feed(file.read_text(encoding="utf-8", errors="replace"))
    text = re.sub(r"[ \t]+\n", "\n", "".join(parser.parts))
    yield Text("", re.sub(r"\n{3,}", "\n\n", text).strip())


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._skipping = 0
        self._verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipping += tag in _SKIPPED
        self._verbatim += tag == "pre"
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        self._skipping -= tag in _SKIPPED and self._skipping > 0
        self._verbatim -= tag == "pre" and self._verbatim > 0
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self.parts.append(data if self._verbatim else re.sub(r"\s+", " ", data))

    def _break(self, tag: str) -> None:
        if tag in _BLOCKS:
            self.parts.append("\n\n")
        elif tag in _LINES:
            self.parts.append("\n")
