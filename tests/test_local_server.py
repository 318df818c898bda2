"""kvzap_sglang.local_server with stand-ins for SGLang: a server that never starts, and one that does not want to stop."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvzap_sglang import local_server
from kvzap_sglang.local_server import ServerError
from tests.processes import is_running

FAKE_SERVER = Path(__file__).with_name("cpu_runtime") / "fake_server.py"


def launch(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Start Python with `arguments` and the port where SGLang would be started."""
    monkeypatch.setattr(local_server, "launch_command", lambda model, port, flags: [sys.executable, *arguments])


def test_a_server_that_dies_shows_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launch(monkeypatch, str(FAKE_SERVER), "0", "dies")
    with (
        pytest.raises(ServerError, match=r"(?s)ended with code 1.*cannot load the model"),
        local_server.local_server("m", tmp_path / "log"),
    ):
        pytest.fail("the block must not run")


def test_a_server_that_never_gets_healthy_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_server, "START_SECONDS", 0)
    launch(monkeypatch, "-c", "import time; time.sleep(600)")
    with (
        pytest.raises(ServerError, match="not healthy after 0 s"),
        local_server.local_server("m", tmp_path / "log"),
    ):
        pytest.fail("the block must not run")


def test_a_deaf_server_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_server, "STOP_SECONDS", 0.5)
    port = local_server.free_port()
    launch(monkeypatch, str(FAKE_SERVER), str(port), "deaf")
    with local_server.local_server("m", tmp_path / "log", port=port) as server:
        child = int(server.log().split()[0])
        assert is_running(child) and server.process.poll() is None
    assert server.process.poll() is not None
    for _ in range(100):
        if not is_running(child):
            break
        os.sched_yield()
    assert not is_running(child)


def test_the_environment_adds_to_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("KVZAP_TEST_OURS", "ours")
    env = local_server.launch_environment({"KVZAP_TEST_THEIRS": "theirs"})
    assert (env["HF_HUB_OFFLINE"], env["KVZAP_TEST_OURS"], env["KVZAP_TEST_THEIRS"]) == ("1", "ours", "theirs")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert local_server.launch_environment()["HF_HUB_OFFLINE"] == "0"
