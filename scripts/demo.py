"""Start a pruned SGLang server on SmolLM2-135M-Instruct, run an example against it, stop it (`make demo`, `make serve`).

    python scripts/demo.py [--surrogate FOLDER] [--models models] [--serve] [--port N] [--example FILE]

The exit code is the example's; with --serve the server stays in the foreground until Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = "SmolLM2-135M-Instruct"
SURROGATE_VARIABLE = "KVZAP_SURROGATE"
DEVELOPMENT_SURROGATE = REPOSITORY.parent / "shared" / "data" / f"KVzap-mlp-{MODEL}"
THRESHOLD = -3.0  # removes about two thirds on this model; retrieval holds up to here, not beyond
HOST = "127.0.0.1"
START_SECONDS = 600  # 20 s on two free cores; minutes on busy ones
STOP_SECONDS = 20


class DemoError(Exception):
    """The demo cannot go on; the text says what to do."""


def find_surrogate(flag: str | None) -> Path:
    """The surrogate's folder: the flag, else $KVZAP_SURROGATE, else the development data beside the repository.

    Raises DemoError when there is none, or when the one asked for is not a folder with a config.json.
    """
    asked = flag or os.environ.get(SURROGATE_VARIABLE)
    folder = Path(asked) if asked else DEVELOPMENT_SURROGATE
    if (folder / "config.json").is_file():
        return folder
    if asked:
        raise DemoError(f"{folder} holds no surrogate (no config.json in it)")
    raise DemoError(
        f"no surrogate for {MODEL}: set {SURROGATE_VARIABLE}=FOLDER (or give --surrogate FOLDER), where FOLDER is one "
        "in kvpress' format (config.json and model.safetensors)"
    )


def server_command(model: Path, surrogate: Path, port: int) -> list[str]:
    """The launch line: SGLang's own, plus the press."""
    press = ["--kv-press", "kvzap", "--kv-press-model", str(surrogate), f"--kv-press-threshold={THRESHOLD}"]
    limits = ["--max-total-tokens", "16384", "--max-running-requests", "8", "--chunked-prefill-size", "1024"]
    # Without kvzap-sglang-cpu this is a GPU machine, and SGLang finds the device by itself.
    device = ["--device", "cpu"] if importlib.util.find_spec("kvzap_sglang_cpu") else []
    serve = [*device, "--enable-cache-report", "--host", HOST, "--port", str(port)]
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *press, *limits, *serve]


def server_environment() -> dict[str, str]:
    """Ours, with no look-ups at the hub: model and surrogate are local."""
    return {"HF_HUB_OFFLINE": "1", **os.environ}


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def is_healthy(url: str) -> bool:
    """Whether the server answers /health, which runs one token through the model."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def wait_until_healthy(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Poll /health, showing the seconds; raises DemoError with the log's end when the server dies or takes too long."""
    start = time.monotonic()
    while not is_healthy(url):
        waited = time.monotonic() - start
        if server.poll() is not None:
            raise DemoError(f"the server ended with code {server.returncode}:\n{log_tail(log)}")
        if waited > START_SECONDS:
            raise DemoError(f"the server is not healthy after {START_SECONDS} s:\n{log_tail(log)}")
        show_progress(f"starting the server ... {waited:.0f} s")
        time.sleep(1 if sys.stdout.isatty() else 5)
    show_progress(f"server ready at {url} after {time.monotonic() - start:.0f} s", last=True)


def show_progress(text: str, last: bool = False) -> None:
    """One line that is overwritten on a terminal, a line of its own in a file."""
    if sys.stdout.isatty():
        print(f"\r{text}", end="\n" if last else "", flush=True)
    else:
        print(text, flush=True)


def log_tail(log: Path, lines: int = 30) -> str:
    """The last lines of the server's log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def stop(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the main process, which stops its children; after STOP_SECONDS SIGKILL to what is left of its group."""
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"the server did not stop within {STOP_SECONDS} s: killing it", flush=True)
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing was left
    server.wait()


@contextmanager
def running_server(command: list[str], url: str, log_file: IO[bytes]) -> Iterator[None]:
    """The server as leader of its own process group, healthy inside the block and gone after it."""
    server = subprocess.Popen(
        command, stdout=log_file, stderr=subprocess.STDOUT, env=server_environment(), start_new_session=True
    )
    try:
        wait_until_healthy(server, url, Path(log_file.name))
        yield
    finally:
        stop(server)


def run_demo(model: Path, surrogate: Path, port: int, example: Path) -> int:
    """Serve, run `example --base-url URL`, stop; the example's exit code."""
    url = f"http://{HOST}:{port}"
    command = server_command(model, surrogate, port)
    print("$", " ".join(command), flush=True)
    with tempfile.NamedTemporaryFile(prefix="kvzap-demo-", suffix=".log", delete=False) as log_file:
        print(f"server log: {log_file.name}", flush=True)
        with running_server(command, url, log_file):
            code = subprocess.run([sys.executable, str(example), "--base-url", url], check=False).returncode
    print("server stopped (a model of 135 M parameters: judge it by the figures, not by its advice)", flush=True)
    return code


def main(argv: list[str] | None = None) -> int:
    """Command line; 1 with a message for a DemoError, else the example's (or the server's) exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--surrogate", help=f"folder of the surrogate (default: ${SURROGATE_VARIABLE})")
    parser.add_argument("--models", type=Path, default=REPOSITORY / "models", help="folder that `make models` filled")
    parser.add_argument("--example", type=Path, default=REPOSITORY / "examples" / "multi_turn_chat.py")
    parser.add_argument("--serve", action="store_true", help="serve in the foreground instead of running the example")
    parser.add_argument("--port", type=int, help="port of the server (default: a free one; 30000 with --serve)")
    args = parser.parse_args(argv)
    model: Path = args.models / MODEL
    # SIGTERM must unwind like Ctrl-C, or the server would outlive us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if not (model / "config.json").is_file():
            raise DemoError(f"no model at {model}: run `make models`")
        surrogate = find_surrogate(args.surrogate)
        if args.serve:
            command = server_command(model, surrogate, args.port or 30000)
            print("$", " ".join(command), flush=True)
            os.execve(command[0], command, server_environment())
        return run_demo(model, surrogate, args.port or free_port(), args.example)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
