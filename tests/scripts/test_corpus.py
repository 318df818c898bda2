"""The calibration corpus: cutting, splitting, reading, and what the committed manifest claims."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvzap_sglang.surrogates import shipped_surrogate
from scripts.corpus import build, readers
from scripts.corpus.excerpts import LONGEST, SHORTEST, excerpts, is_monotonous
from scripts.corpus.sources import PERMITTED, SOURCES
from tests.servers import model_path

MANIFEST = Path(build.__file__).parents[2] / "kvzap_sglang" / "surrogates" / "corpus_manifest.json"
KINDS = {"prose", "encyclopaedic", "code", "reference", "dialogue", "mathematics", "languages", "tables"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path("SmolLM2-135M-Instruct"))


def paragraphs(count: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    words = [f"{a}{b}" for a in ("ba", "ke", "li", "mo", "nu") for b in ("ra", "se", "ti", "vo", "zu")]
    return "\n\n".join(" ".join(rng.choices(words, k=40)) + "." for _ in range(count))


def test_excerpts_are_whole_paragraphs_of_the_right_length(tokenizer: Any) -> None:
    text = paragraphs(80)
    found = list(excerpts(tokenizer, text, "name"))
    assert len(found) == 2 and found == list(excerpts(tokenizer, text, "name"))
    for piece in found:
        assert SHORTEST < len(tokenizer(piece)["input_ids"]) < LONGEST + 150
        assert all(part in text.split("\n\n") for part in piece.split("\n\n"))
    assert list(excerpts(tokenizer, paragraphs(2), "name")) == []


def test_tables_are_cut_by_lines(tokenizer: Any) -> None:
    text = "\n".join(f"{i},{i * i},{i % 7}" for i in range(1000))
    (first, *_) = excerpts(tokenizer, text, "table")
    assert all(line in text.splitlines() for line in first.splitlines())


def test_monotonous_text_is_told_apart() -> None:
    assert is_monotonous("same line\n" * 50) and not is_monotonous(Path(build.__file__).read_text())


def test_a_kind_is_taken_from_its_sources_in_turn() -> None:
    def row(name: str, split: str) -> dict[str, Any]:
        return {"text": name, "split": split}

    many = [row(f"a{i}", "train") for i in range(100)] + [row(f"ah{i}", "held_out") for i in range(20)]
    few = [row(f"b{i}", "train") for i in range(5)] + [row("a0", "train")]
    chosen = build.choose([many, few])
    texts = [each["text"] for each in chosen]
    assert len(set(texts)) == len(texts) and {f"b{i}" for i in range(5)} <= set(texts)
    assert sum(each["split"] == "train" for each in chosen) == build.PER_KIND["train"]
    assert sum(each["split"] == "held_out" for each in chosen) == build.PER_KIND["held_out"]


def test_a_document_is_on_one_side(tmp_path: Path) -> None:
    sides = [build.split_of(f"document {i}") for i in range(500)]
    assert sides == [build.split_of(f"document {i}") for i in range(500)]
    assert 60 < sides.count("held_out") < 140


def test_readers(tmp_path: Path) -> None:
    page = "<html><head><title>no</title></head><body><p>One &amp;\n two</p><pre>a\n  b</pre><script>no</script></body>"
    (tmp_path / "p.html").write_text(page)
    (only,) = readers.html(tmp_path / "p.html")
    assert only.text == "One & two\n\na\n  b"
    (tmp_path / "c.c").write_text("/* Licence\n text */\nint x; /* kept */\n")
    assert next(readers.code(tmp_path / "c.c")).text == "int x; /* kept */\n"
    (tmp_path / "f.json").write_text(
        json.dumps({"Land": {"Area": {"text": "5<b>km</b>"}, "Sea": {"Depth": {"text": "1 m"}}}})
    )
    assert next(readers.factbook(tmp_path / "f.json")).text == "Land: Area: 5 km\n\nSea: Depth: 1 m"


def test_every_source_is_permitted_and_every_kind_has_one() -> None:
    assert {source.kind for source in SOURCES} == KINDS
    assert {source.licence for source in SOURCES} <= set(PERMITTED)


def test_the_manifest_says_what_the_shipped_surrogates_saw() -> None:
    manifest = json.loads(MANIFEST.read_text())
    assert manifest["kinds"].keys() == KINDS
    assert sum(counts["train"] for counts in manifest["kinds"].values()) >= 250
    assert {source["licence"] for source in manifest["sources"]} <= set(PERMITTED)
    assert all(source["sha256"] and source["file"] and source["evidence"] for source in manifest["sources"])
    named = {(source["kind"], source["package"], source["licence"]) for source in manifest["sources"]}
    for kind in ("linear", "mlp"):
        report = json.loads((shipped_surrogate(kind) / "calibration.json").read_text())
        for side in ("train", "held_out"):
            used = {(s["kind"], s["source"], s["licence"]) for s in report["corpus"][side]["sources"]}
            assert used <= named
        assert report["corpus"]["train"]["prompts"] >= 250
