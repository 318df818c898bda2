"""Methods matched in what they remove, answers on disk, and the tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvzap_sglang.evaluate.errors import EvaluationError
from kvzap_sglang.evaluate.methods import Method, matched_random, matched_streaming
from kvzap_sglang.evaluate.plots import draw
from kvzap_sglang.evaluate.report import markdown, paired_interval, summarise, write_tables
from kvzap_sglang.evaluate.results import ANSWERS_FILE, SETTINGS_FILE, Results, Row, Setting

FULL, PRUNED = Setting("full", "", "", "hit"), Setting("kvzap s -3", "dense", "prune", "hit")


def row(key: str, setting: Setting, score: float, context: str = "c", task: str = "t", removed: float = 0.5) -> Row:
    return Row(key, task, 0, setting, context, 1000, "text", score, removed, 1000, 1020, 0.5, [1, 2])


@pytest.mark.parametrize("removed", [0.0, 0.3, 0.66, 0.86])
def test_baselines_remove_as_much(removed: float) -> None:
    length = 1200
    random = matched_random(removed, length, "kvzap")
    assert np.exp(random.level or 0.0) * (length - 128 - 4) / length == pytest.approx(removed, abs=1e-5)
    streaming = matched_streaming(removed, length, "kvzap")
    assert 1 - ((streaming.level or 0) + 4) / length == pytest.approx(removed, abs=1e-3)


def test_what_a_method_asks_and_needs() -> None:
    assert Method("full", "folder/S").asked == "off"
    kvzap = Method("kvzap", "folder/S", -3.0)
    assert (kvzap.asked, kvzap.label) == ({"threshold": -3.0}, "kvzap S -3")
    assert (
        kvzap.server_flags(128)
        == Method("full", "folder/S").server_flags(128)
        != Method("full", "folder/T").server_flags(128)
    )
    assert matched_random(0.5, 1000, "x").asked == {"threshold": matched_random(0.5, 1000, "x").level}
    assert matched_streaming(0.5, 1000, "x").server_flags(128) == (
        "--kv-press-window=496",
        "--kv-press",
        "streaming",
    )
    assert matched_streaming(0.5, 1000, "x").asked is None


def test_answers_are_taken_up_again(tmp_path: Path) -> None:
    results = Results(tmp_path / "out", {"model": "m"}, {"S": "1"}, {"a": "1"})
    results.add(row("a", FULL, 1.0))
    results.add(row("b", FULL, 0.0))
    with (tmp_path / "out" / ANSWERS_FILE).open("a") as file:
        file.write('{"key": "c", "ta')  # killed while writing
    cut = "é".encode()[:1]
    (tmp_path / "out" / ANSWERS_FILE).write_bytes((tmp_path / "out" / ANSWERS_FILE).read_bytes() + cut)
    again = Results(tmp_path / "out", {"model": "m"}, {"S": "1"}, {"a": "1"})
    assert again.rows == results.rows
    assert again.has(FULL, "a") and not again.has(PRUNED, "a") and not again.has(FULL, "c")
    again.add(row("c", FULL, 1.0))
    assert [json.loads(line)["key"] for line in (tmp_path / "out" / ANSWERS_FILE).read_text().splitlines()] == [
        "a",
        "b",
        "c",
    ]


def test_answers_of_other_settings_are_refused(tmp_path: Path) -> None:
    Results(tmp_path / "out", {"model": "m"}, {"S": "1"}, {"a": "1"})
    with pytest.raises(EvaluationError, match=r"--out .*other settings"):
        Results(tmp_path / "out", {"model": "n"}, {"S": "1"}, {"a": "1"})
    with pytest.raises(EvaluationError, match=r"--out .*other surrogates, S"):
        Results(tmp_path / "out", {"model": "m"}, {"S": "2"}, {"a": "1"})
    Results(tmp_path / "out", {"model": "m"}, {"T": "2"}, {"a": "1"})
    with pytest.raises(EvaluationError, match=r"--out .*other surrogates, T"):
        Results(tmp_path / "out", {"model": "m"}, {"T": "3", "S": "1"}, {"a": "1"})
    Results(tmp_path / "out", {"model": "m"}, {"T": "2"}, {"b": "2"})
    with pytest.raises(EvaluationError, match=r"--out .*other examples, a "):
        Results(tmp_path / "out", {"model": "m"}, {"T": "2"}, {"a": "2", "b": "2"})
    (tmp_path / "out" / SETTINGS_FILE).write_text("{")
    with pytest.raises(EvaluationError, match=r"--out .*is damaged"):
        Results(tmp_path / "out", {"model": "m"}, {}, {"a": "1"})
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match=r"--out .*this is a file"):
        Results(tmp_path / "file", {}, {}, {"a": "1"})


def test_the_table_pairs_examples() -> None:
    rows = [row(str(i), FULL, float(i % 4 != 0), context=str(i // 4)) for i in range(40)]
    rows += [row(str(i), PRUNED, float(i % 2), context=str(i // 4)) for i in range(36)]  # four are still missing
    full, pruned = summarise(rows)
    assert (full.score, full.ratio, full.low, full.high) == (0.75, 1.0, 1.0, 1.0)
    assert (pruned.examples, pruned.contexts, pruned.score, pruned.full) == (36, 9, 0.5, 0.75)
    assert pruned.ratio == pytest.approx(2 / 3) == pruned.low
    assert "| kvzap s -3 | dense | prune | hit | 36 (9) | 0.500 | 0.500 | 0.667 | 0.667 to 0.667 |" in markdown(
        [full, pruned]
    )


def test_several_tasks_get_a_line_over_all() -> None:
    lines = summarise([row("a", FULL, 1.0, task="t"), row("b", FULL, 0.0, task="u")])
    assert [(line.task, line.score) for line in lines] == [("t", 1.0), ("u", 0.0), ("all", 0.5)]
    assert lines[1].ratio is None  # of nothing


def test_lengths_are_told_apart() -> None:
    rows = [replace(row(str(length), FULL, 1.0), length=length) for length in (1000, 4000)]
    assert [line.title for line in summarise(rows)] == ["t, 1000 tokens", "t, 4000 tokens"]


def test_the_interval_covers_the_ratio_as_often_as_it_says() -> None:
    rng = np.random.default_rng()
    covered = 0
    for _ in range(200):
        full = rng.binomial(10, 0.8, size=30).astype(float)
        low, high = paired_interval(rng.binomial(full.astype(int), 0.9).astype(float), full)
        covered += low <= 0.9 <= high
    assert 175 <= covered <= 200


def test_files_are_written(tmp_path: Path) -> None:
    rows = [
        row("a", FULL, 1.0),
        row("a", PRUNED, 1.0),
        row("b", Setting("random as kvzap s -3", "dense", "prune", "hit"), 0.0),
    ]
    lines = summarise(rows)
    write_tables(tmp_path, lines, rows)
    assert draw(tmp_path, lines, rows)
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.csv", "results.json", "results.md", "removed-t.png", "depth-t.png",
    }  # fmt: skip
    assert "| kvzap s -3, dense, prune, hit |  |  | 1.000 (1) |  |  |" in (tmp_path / "results.md").read_text()
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 4
    assert json.loads((tmp_path / "results.json").read_text())[1]["method"] == "kvzap s -3"
