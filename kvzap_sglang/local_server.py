"""A real SGLang server as a child process: started as a user starts it, stopped for sure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
START_SECONDS = 600  # 20 s on two free cores; minutes on busy ones
STOP_SECONDS = 20
LINE_SECONDS = 5  # between two lines of progress where they cannot overwrite each other


class ServerError(RuntimeError):
    """The server ended or never became healthy; the text ends with its log."""


@dataclass
class LocalServer:
    """A running server: where it answers, where it logs, its process."""

    url: str
    log_path: Path
    process: subprocess.Popen[bytes]

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log().splitlines()[-lines:])


def launch_command(model: str | Path, port: int, flags: Sequence[str] = ()) -> list[str]:
    """SGLang's own launch line, on the loopback interface."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    return [*command, "--host", HOST, "--port", str(port), *flags]


def launch_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process' environment and `env`; no look-ups at the hub unless they ask for them: what we serve is local."""
    return {"HF_HUB_OFFLINE": "1", **os.environ, **(env or {})}


@contextmanager
def local_server(
    model: str | Path,
    log_path: Path,
    flags: Sequence[str] = (),
    *,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
    progress: bool = False,
) -> Iterator[LocalServer]:
    """Serve `model` with SGLang's own launch line for the duration of a `with` block.

    `env` is added to this process' environment. Raises `ServerError`.
    """
    port = free_port() if port is None else port
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            launch_command(model, port, flags),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=launch_environment(env),
            start_new_session=True,
        )
    server = LocalServer(f"http://{HOST}:{port}", log_path, process)
    try:
        wait_until_healthy(server, progress)
        yield server
    finally:
        stop(process)


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(server: LocalServer, progress: bool) -> None:
    """Poll `/health`, showing the seconds if asked to. Raises `ServerError`."""
    start, next_line = time.monotonic(), 0.0
    while not _is_healthy(server.url):
        waited = time.monotonic() - start
        if server.process.poll() is not None:
            raise ServerError(f"the server ended with code {server.process.returncode}:\n{server.log_tail(60)}")
        if waited > START_SECONDS:
            raise ServerError(f"the server is not healthy after {START_SECONDS} s:\n{server.log_tail(60)}")
        if progress and waited >= next_line:
            _show(f"starting the server ... {waited:.0f} s")
            next_line = waited + (0 if sys.stdout.isatty() else LINE_SECONDS)
        time.sleep(0.5)
    if progress:
        _show(f"server ready at {server.url} after {time.monotonic() - start:.0f} s", last=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the main process, which stops its children; then SIGKILL to what is left of its group."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"the server did not stop within {STOP_SECONDS} s: killing it", flush=True)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _show(text: str, last: bool = False) -> None:
    """One line that is overwritten on a terminal, a line of its own in a file."""
    if sys.stdout.isatty():
        print(f"\r{text}", end="\n" if last else "", flush=True)
    else:
        print(text, flush=True)
