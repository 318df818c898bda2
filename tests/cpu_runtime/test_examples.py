"""The examples against a fake server: what they print with a press, without one, and without a server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def chat(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("examples/multi_turn_chat.py")


@pytest.fixture(scope="module")
def batch(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("examples/long_reasoning_batch.py")


@pytest.fixture
def serve(load_script: Callable[[str], ModuleType]) -> Callable[[bool], object]:
    fake = load_script("tests/cpu_runtime/fake_server.py")

    @contextmanager
    def running(press: bool) -> Iterator[str]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), fake.handler(press))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    return running


def test_chat_prints_a_row_per_turn_with_the_presss_figures(
    chat: ModuleType, serve: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(press=True) as url:
        turns = chat.run(f"{url}/v1", max_tokens=8)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    figures = [row[:7] for row in rows if len(row) == 8 and row[0] in turns and row[1].isdigit()]
    # 3072 and 8192 cells of 256 bytes
    assert figures == [
        [talk, str(n), str(100 * n), str(90 * (n - 1)), "37.5%", "0.8", "2.0"] for talk in "AB" for n in (1, 2, 3)
    ]
    assert [turn.answer for turn in turns["B"]] == ["answer 1", "answer 2", "answer 3"]


def test_chat_says_so_when_the_server_prunes_nothing(
    chat: ModuleType, serve: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(press=False) as url:
        turns = chat.run(url, max_tokens=8)
    out = capsys.readouterr().out
    assert "This server prunes nothing: start it with --kv-press kvzap" in out
    assert all(turn.kept_fraction is None for talk in turns.values() for turn in talk)


def test_handbook_is_long_enough_to_be_worth_caching(models: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "SmolLM2-135M-Instruct")
    assert len(tokenizer.encode((EXAMPLES / "handbook.md").read_text())) >= 1200


@pytest.mark.parametrize(("press", "kept"), [(True, (0.375,) * 4), (False, ())])
def test_batch_counts_tokens_and_the_peak_over_ranks(
    batch: ModuleType, serve: Callable, press: bool, kept: tuple[float, ...]
) -> None:
    with serve(press=press) as url:
        result = asyncio.run(batch.run(url, count=4, max_tokens=7))
    assert result.generated_tokens == 4 * 7
    assert result.peak_running == 2 + 3
    assert result.kept_fractions == kept
    assert result.seconds > 0


@pytest.mark.parametrize("example", ["multi_turn_chat.py", "long_reasoning_batch.py"])
def test_without_a_server_there_is_one_line_and_code_1(example: str) -> None:
    command = [sys.executable, str(EXAMPLES / example), "--base-url", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "no server answers at http://127.0.0.1:9: start one with `make serve`\n"
