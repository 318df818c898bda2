"""scripts/demo.py against a fake server: launch line, exit codes, signals, and what it says when something is missing."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from kvzap_sglang import local_server
from tests.processes import is_running

REPOSITORY = Path(__file__).resolve().parents[2]
FAKE_SERVER = Path(__file__).with_name("fake_server.py")


@pytest.fixture(scope="module")
def demo(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("scripts/demo.py")


@pytest.fixture
def surrogate(tmp_path: Path) -> Path:
    folder = tmp_path / "surrogate"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def models(tmp_path: Path, demo: ModuleType) -> Path:
    """As much of a models folder as the demo itself looks at."""
    folder = tmp_path / "models" / demo.MODEL
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder.parent


def use_fake_server(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(
        local_server, "launch_command", lambda model, port, flags: [sys.executable, str(FAKE_SERVER), str(port), mode]
    )


def is_serving(port: int) -> bool:
    """Whether anything accepts connections there."""
    with socket.socket() as probe:
        return probe.connect_ex((local_server.HOST, port)) == 0


def test_the_surrogate_is_the_packages_unless_another_is_given(demo: ModuleType) -> None:
    assert demo.server_flags(None)[:3] == ["--kv-press", "kvzap", "--max-total-tokens"]
    assert demo.server_flags("folder")[:4] == ["--kv-press", "kvzap", "--kv-press-model", "folder"]


def test_a_missing_model_says_make_models(
    demo: ModuleType, surrogate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--models", str(tmp_path), "--surrogate", str(surrogate)]) == 1
    assert "run `make models`" in capsys.readouterr().err


@pytest.mark.parametrize("cpu", [True, False])
def test_serve_becomes_sglangs_own_launch_line_with_the_press(
    demo: ModuleType, models: Path, surrogate: Path, monkeypatch: pytest.MonkeyPatch, cpu: bool
) -> None:
    became: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(demo.os, "execve", lambda *call: became.append(call) or sys.exit(0))
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: object() if cpu else None)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(SystemExit):
        demo.main(["--serve", "--models", str(models), "--surrogate", str(surrogate)])
    [(program, command, env)] = became
    assert program == command[0] == sys.executable
    assert command[1:5] == ["-m", "sglang.launch_server", "--model-path", str(models / demo.MODEL)]
    assert command[5:9] == ["--host", "127.0.0.1", "--port", "30000"]
    assert f"--kv-press kvzap --kv-press-model {surrogate} --max" in " ".join(command)
    assert ("--device cpu" in " ".join(command)) is cpu
    assert env["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_the_examples(
    demo: ModuleType,
    models: Path,
    surrogate: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    code: int,
) -> None:
    use_fake_server(monkeypatch, "press")
    example = tmp_path / "example.py"
    example.write_text(f"import sys; print('example got', *sys.argv[1:]); sys.exit({code})")
    port = local_server.free_port()
    arguments = ["--models", str(models), "--surrogate", str(surrogate), "--example", str(example), "--port", str(port)]
    assert demo.main(arguments) == code
    out = capfd.readouterr().out
    assert "starting the server ... 0 s\n" in out and f"server ready at http://127.0.0.1:{port} after" in out
    assert f"example got --base-url http://127.0.0.1:{port}" in out
    assert out.splitlines()[-1].startswith("server stopped")
    assert not is_serving(port)


def test_a_server_that_dies_shows_its_last_words(
    demo: ModuleType,
    models: Path,
    surrogate: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_fake_server(monkeypatch, "dies")
    assert demo.main(["--models", str(models), "--surrogate", str(surrogate), "--example", "never.py"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("demo: the server ended with code 1:\n") and "cannot load the model" in error


INTERRUPTED = f"""
import sys
from kvzap_sglang import local_server
local_server.launch_command = lambda model, port, flags: [sys.executable, {str(FAKE_SERVER)!r}, str(port), "press"]
from scripts import demo
sys.exit(demo.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server(models: Path, surrogate: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Also where the example is at work: it ends, the server ends, the exit code tells which signal it was."""
    example = tmp_path / "example.py"
    example.write_text("import os, time; print('at work:', os.getpid(), flush=True); time.sleep(600)")
    port = local_server.free_port()
    arguments = ["--models", str(models), "--surrogate", str(surrogate), "--example", str(example), "--port", str(port)]
    command = [sys.executable, "-c", INTERRUPTED, *arguments]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        at_work = next(line for line in process.stdout if line.startswith("at work: "))
        assert is_serving(port)
        process.send_signal(number)
        try:
            assert process.wait(60) == 128 + number
        finally:
            process.kill()
    assert not is_serving(port)
    assert not is_running(int(at_work.split()[-1]))
