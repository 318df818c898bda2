"""`kvzap-sglang evaluate` against a server that answers from the text itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvzap_sglang.cli import main
from tests.evaluate.fake_server import KEPT, FakeServer, running
from tests.servers import model_path
from tests.surrogates import make_surrogate


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path("SmolLM2-135M-Instruct"))


@pytest.fixture
def server(tokenizer: Any) -> Iterator[FakeServer]:
    """Knows the number of every key but those that begin with a letter before g."""

    def answer(ids: list[int]) -> str:
        text = tokenizer.decode(ids)
        asked = re.search(r"What is the secret number of (\w+)\?", text)
        if asked is None or asked[1] < "g":
            return "no idea"
        found = re.search(rf"secret number of {asked[1]} is (\d+)", text)
        return f" {found[1]}." if found else "nothing"

    with running(FakeServer(answer)) as started:
        yield started


def command(server: FakeServer, out: Path, *more: str) -> list[str]:
    fixed = ["evaluate", "--url", server.url, "--tokenizer", model_path("SmolLM2-135M-Instruct"), "--out", str(out)]
    return [*fixed, "--thresholds", "-4", "-3", "--length", "500", "--contexts", "3", "--questions", "4", *more]


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]


def test_contexts_are_cached_once_and_questions_asked_over_them(server: FakeServer, tmp_path: Path) -> None:
    assert main(command(server, tmp_path / "out")) == 0
    rows = read(tmp_path / "out")
    assert len(rows) == 3 * 3 * 4
    assert len(server.calls) == 3 * 3 * (1 + 4)
    for row in rows:
        right = re.search(r"secret number of (\w+)", row["answer"]) is None and row["answer"] != "no idea"
        assert row["score"] == float(right)
        assert row["cached_tokens"] == row["context_tokens"] < row["prompt_tokens"]
        assert row["removed"] == (0.0 if row["setting"]["method"] == "full" else pytest.approx(1 - KEPT))
    lines = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [line["method"] for line in lines] == ["full", "kvzap server -4", "kvzap server -3"]
    assert len({line["score"] for line in lines}) == 1 and 0 < lines[0]["score"] < 1


def test_goes_on_where_it_stopped(server: FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(command(server, out, "--parallel", "1")) == 0
    answers = (out / "answers.jsonl").read_text().splitlines(keepends=True)
    (out / "answers.jsonl").write_text("".join(answers[:-2]))
    server.calls.clear()
    server.prefixes.clear()
    assert main(command(server, out, "--parallel", "1")) == 0
    assert len(server.calls) == 1 + 2
    assert sorted((out / "answers.jsonl").read_text().splitlines(keepends=True)) == sorted(answers)


def test_a_folder_takes_more_examples_but_no_others(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(command(server, out)) == 0
    server.calls.clear()
    assert main(command(server, out, "--contexts", "4")) == 0
    assert len(server.calls) == 3 * (1 + 4) and len(read(out)) == 3 * 4 * 4
    (tmp_path / "other.txt").write_text("Some other text to hide them in. " * 200)
    assert main(command(server, out, "--haystack", str(tmp_path / "other.txt"))) == 2
    assert "holds answers of other examples" in capsys.readouterr().err


def test_an_evicted_context_is_cached_again(server: FakeServer, tmp_path: Path) -> None:
    server.evict = 2
    assert main(command(server, tmp_path / "out")) == 0
    assert all(row["cached_tokens"] >= row["context_tokens"] for row in read(tmp_path / "out"))
    assert len(server.calls) > 3 * 3 * (1 + 4)


def test_a_context_that_cannot_stay_is_said(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.evict = 10_000
    assert main(command(server, tmp_path / "out")) == 2
    assert "was evicted 3 times" in capsys.readouterr().err


def test_cold_shares_nothing(server: FakeServer, tmp_path: Path) -> None:
    assert main(command(server, tmp_path / "out", "--reuse", "cold")) == 0
    assert all(row["cached_tokens"] == 0 for row in read(tmp_path / "out"))
    assert len(server.calls) == 3 * 3 * 4


def test_a_branch_is_passed_before_it_is_asked_about(server: FakeServer, tmp_path: Path) -> None:
    assert main(command(server, tmp_path / "out", "--reuse", "branch")) == 0
    assert len(server.calls) == 3 * 3 * (2 + 4)
    contexts = {row["context_tokens"] for row in read(tmp_path / "out")}
    passing = [len(call["input_ids"]) for call in server.calls if call["sampling_params"]["max_new_tokens"] == 1]
    assert {length + 2 * 128 + 2 for length in contexts} <= set(passing) and len(passing) == 3 * 3 * 2


def test_own_prompts_are_compared_with_the_full_cache(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": "Hello", "context": "Some text. " * 60}) + "\n")
    more = ("--task", "own", "--own", str(tmp_path / "own.jsonl"), "--new-tokens", "2")
    assert main(command(server, tmp_path / "out", *more)) == 0
    full, *pruned = read(tmp_path / "out")
    assert (full["score"], full["kl"]) == (1.0, 0.0)
    for row in pruned:
        assert row["score"] == 0.5 and 0.02 < row["kl"] < 0.4
    forced = [call for call in server.calls if "logprob_start_len" in call]
    assert all(call["input_ids"][call["logprob_start_len"] + 1 :] == [1, 2] for call in forced) and len(forced) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--task", "riddles"), "--task riddles: unknown"),
        (("--task", "qa"), "--task qa reads --qa, which is missing"),
        (("--haystack", "/absent"), "/absent: no such file or folder"),
        (("--length", "120", "--questions", "30"), "--length 120, task needle-multikey"),
        (("--contexts", "0"), "--contexts 0: give at least 1"),
        (("--thresholds", "nan"), "--thresholds: give finite numbers"),
        (("--depths", "0.6", "0.6"), "--depths 0.6 0.6: give two depths between 0 and 1"),
        (("--depths", "-0.1", "1"), "--depths -0.1 1: give two depths between 0 and 1"),
        (("--baseline", "random"), "--baseline needs servers of its own"),
        (("--prefill", "sparse"), "--prefill: the server of --url runs dense"),
        (("--decode", "keep", "--decode", "prune"), "--decode: the server of --url runs prune"),
        (("--window", "64"), "--window 64: the server of --url has 128"),
        (("--url", "http://127.0.0.1:9"), "--url http://127.0.0.1:9: no SGLang server answers"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    server: FakeServer, tmp_path: Path, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(server, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("kvzap-sglang evaluate: ") and message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [({"kv_press": "random"}, "it runs --kv-press random"), ({"kv_press_lock": True}, "--kv-press-lock")],
)
def test_a_server_that_cannot_do_it(
    tmp_path: Path, config: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(FakeServer(lambda ids: "", config)) as server:
        assert main(command(server, tmp_path / "out")) == 2
    assert message in capsys.readouterr().err


def test_surrogates_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(make_surrogate(tmp_path / place / "S", hidden=64, layers=2, kv_heads=2)) for place in "ab"]
    flags = ["--surrogate", paths[0], "--surrogate", paths[1]]
    model = model_path("tiny-llama-random")
    assert main(["evaluate", "--model", model, "--out", str(tmp_path / "out"), *flags]) == 2
    assert "--surrogate: two of one name" in capsys.readouterr().err
