"""scripts/demo.py against a fake server: start, health, stop, exit codes, and what it says when something is missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

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


def use_fake_server(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(
        demo, "server_command", lambda model, surrogate, port: [sys.executable, str(FAKE_SERVER), str(port), mode]
    )


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie (nobody reaps an orphan in some containers)."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_surrogate_comes_from_the_flag_then_the_variable(
    demo: ModuleType, surrogate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVZAP_SURROGATE", str(surrogate))
    assert demo.find_surrogate(None) == surrogate
    monkeypatch.setenv("KVZAP_SURROGATE", "/nonexistent")
    assert demo.find_surrogate(str(surrogate)) == surrogate


def test_no_surrogate_says_what_to_set(demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVZAP_SURROGATE", raising=False)
    monkeypatch.setattr(demo, "DEVELOPMENT_SURROGATE", tmp_path / "absent")
    with pytest.raises(demo.DemoError, match="set KVZAP_SURROGATE=FOLDER"):
        demo.find_surrogate(None)
    with pytest.raises(demo.DemoError, match="holds no surrogate"):
        demo.find_surrogate(str(tmp_path))


def test_a_missing_model_says_make_models(
    demo: ModuleType, surrogate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--models", str(tmp_path), "--surrogate", str(surrogate)]) == 1
    assert "run `make models`" in capsys.readouterr().err


@pytest.mark.parametrize("cpu", [True, False])
def test_launch_line_is_sglangs_own_with_the_press(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, cpu: bool
) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: object() if cpu else None)
    command = demo.server_command(Path("m"), Path("s"), 31000)
    assert command[1:5] == ["-m", "sglang.launch_server", "--model-path", "m"]
    assert "--kv-press kvzap --kv-press-model s --kv-press-threshold=-3.0" in " ".join(command)
    assert ("--device cpu" in " ".join(command)) is cpu
    assert command[-2:] == ["--port", "31000"]


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_the_examples(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    use_fake_server(demo, monkeypatch, "press")
    example = tmp_path / "example.py"
    example.write_text(f"import sys; print('example got', *sys.argv[1:]); sys.exit({code})")
    port = demo.free_port()
    assert demo.run_demo(Path("m"), Path("s"), port, example) == code
    out = capfd.readouterr().out
    assert f"example got --base-url http://127.0.0.1:{port}" in out
    assert out.splitlines()[-1].startswith("server stopped")
    assert not demo.is_healthy(f"http://127.0.0.1:{port}")


def test_a_server_that_dies_shows_its_last_words(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_server(demo, monkeypatch, "dies")
    with pytest.raises(demo.DemoError, match=r"(?s)ended with code 1.*cannot load the model"):
        demo.run_demo(Path("m"), Path("s"), demo.free_port(), Path("never.py"))


def test_a_server_that_never_gets_healthy_is_given_up(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "START_SECONDS", 0)
    command = [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)"]
    with (
        (tmp_path / "log").open("wb") as log,
        pytest.raises(demo.DemoError, match="not healthy after 0 s"),
        demo.running_server(command, f"http://127.0.0.1:{demo.free_port()}", log),
    ):
        pytest.fail("the block must not run")


def test_a_deaf_server_is_killed_with_its_children(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "STOP_SECONDS", 0.5)
    port = demo.free_port()
    command = [sys.executable, str(FAKE_SERVER), str(port), "deaf"]
    with (tmp_path / "log").open("wb") as log:
        with demo.running_server(command, f"http://127.0.0.1:{port}", log):
            child = int((tmp_path / "log").read_text().split()[0])
            assert is_running(child)
        assert not demo.is_healthy(f"http://127.0.0.1:{port}")
    for _ in range(100):
        if not is_running(child):
            break
        os.sched_yield()
    assert not is_running(child)
