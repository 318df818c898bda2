"""Reading a corpus and cutting it into prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvzap_sglang.calibrate.corpus import MAX_TOKENS, MIN_TOKENS, Document, cut_prompts, read_corpus
from kvzap_sglang.calibrate.errors import CalibrationError
from tests.servers import model_path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path("SmolLM2-135M-Instruct"))


def text_of(words: int, seed: str) -> str:
    """About as many tokens as words, and no piece like another."""
    rng = random.Random(seed)
    return " ".join(rng.choice(("red", "green", "blue", "house", "river", "stone")) for _ in range(words))


def document(name: str, words: int = 1000, kind: str = "prose", split: str | None = None) -> Document:
    return Document(f"{name} {text_of(words, kind + name)}", kind, "source", "MIT", name, split)


def test_reads_text_and_jsonl(tmp_path: Path) -> None:
    (tmp_path / "prose").mkdir()
    (tmp_path / "prose" / "a.txt").write_text("first")
    (tmp_path / "prose" / "ignored.png").write_bytes(b"\xff\xfe")
    row = {"text": "second", "kind": "code", "licence": "MIT", "source": "s", "document": "d", "split": "held_out"}
    (tmp_path / "b.jsonl").write_text(json.dumps(row) + "\n\n" + json.dumps({"text": "third"}) + "\n")
    code, bare, prose = read_corpus([tmp_path])
    assert code == Document("second", "code", "s", "MIT", "d", "held_out")
    assert (bare.text, bare.kind, bare.split) == ("third", "b", None)
    assert (prose.text, prose.kind) == ("first", "prose")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{", "not JSON"),
        ("a.jsonl", b"[1]", 'no "text"'),
        ("a.jsonl", b'{"text": "x", "split": "test"}', "\"split\" is 'test'"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.csv", b"x", "no document in it"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=f"^--corpus .*{message}"):
        read_corpus([tmp_path])


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"--corpus .*absent: no such file or folder"):
        read_corpus([tmp_path / "absent"])


def test_no_document_is_on_both_sides(tokenizer: Any) -> None:
    documents = [document(f"{kind}{index}", 4000, kind) for kind in ("a", "b") for index in range(6)]
    train, held_out = cut_prompts(tokenizer, documents, held_out=2, seed=0)
    names = [{prompt.document for prompt in side} for side in (train, held_out)]
    assert names[0].isdisjoint(names[1]) and len(names[1]) == 4
    lengths = [len(tokenizer(prompt.text)["input_ids"]) for prompt in train + held_out]
    assert min(lengths) > MIN_TOKENS and max(lengths) < MAX_TOKENS
    assert cut_prompts(tokenizer, list(reversed(documents)), held_out=2, seed=0) == (train, held_out)
    assert cut_prompts(tokenizer, documents, held_out=2, seed=1).train != train


def test_the_corpus_may_choose_and_a_text_under_two_names_is_held_out(tokenizer: Any) -> None:
    chosen = document("a", split="held_out")
    twin = Document(chosen.text, "prose", "elsewhere", "MIT", "twin", "train")
    others = [document(name, split="train") for name in "bcd"]
    train, held_out = cut_prompts(tokenizer, [twin, chosen, *others], held_out=1, seed=0)
    assert {prompt.document for prompt in held_out} == {"a"}
    assert {prompt.document for prompt in train} == {"b", "c", "d"}


@pytest.mark.parametrize("words", [300, 3])
def test_too_little_is_refused(tokenizer: Any, words: int) -> None:
    with pytest.raises(CalibrationError, match=f"--corpus.*more than {MIN_TOKENS} tokens"):
        cut_prompts(tokenizer, [document(name, words) for name in "abcd"], held_out=1, seed=0)
