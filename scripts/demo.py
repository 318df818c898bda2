"""Start a pruned SGLang server on SmolLM2-135M-Instruct, run an example against it, stop it (`make demo`, `make serve`).

    python scripts/demo.py [--surrogate FOLDER] [--models models] [--serve] [--port N] [--example FILE]

The exit code is the example's; with --serve the server stays in the foreground until Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from kvzap_sglang.local_server import ServerError, free_port, launch_command, launch_environment, local_server

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = "SmolLM2-135M-Instruct"


class DemoError(Exception):
    """The demo cannot go on; the text says what to do."""


def server_flags(surrogate: str | None) -> list[str]:
    """What the launch line says beside model and port: the press, the limits, the device.

    Without a `surrogate` the one that comes with the package is used, at its threshold.
    """
    press = ["--kv-press", "kvzap", *(["--kv-press-model", surrogate] if surrogate else [])]
    limits = ["--max-total-tokens", "16384", "--max-running-requests", "8", "--chunked-prefill-size", "1024"]
    # Without kvzap-sglang-cpu this is a GPU machine, and SGLang finds the device by itself.
    device = ["--device", "cpu"] if importlib.util.find_spec("kvzap_sglang_cpu") else []
    return [*press, *limits, *device, "--enable-cache-report"]


def run_demo(model: Path, surrogate: str | None, port: int, example: Path) -> int:
    """Serve, run `example --base-url URL`, stop; the example's exit code. Raises ServerError."""
    log_path = Path(tempfile.mkdtemp(prefix="kvzap-demo-")) / "server.log"
    flags = server_flags(surrogate)
    print("$", " ".join(launch_command(model, port, flags)), flush=True)
    print(f"server log: {log_path}", flush=True)
    with local_server(model, log_path, flags, port=port, progress=True) as server:
        code = subprocess.run([sys.executable, str(example), "--base-url", server.url], check=False).returncode
    print("server stopped (a model of 135 M parameters: judge it by the figures, not by its advice)", flush=True)
    return code


def serve(model: Path, surrogate: str | None, port: int) -> NoReturn:
    """Become the server: Ctrl-C and SIGTERM are its own then."""
    command = launch_command(model, port, server_flags(surrogate))
    print("$", " ".join(command), flush=True)
    os.execve(command[0], command, launch_environment())


def main(argv: list[str] | None = None) -> int:
    """Command line; 1 with a message for a DemoError or ServerError, else the example's (or the server's) exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--surrogate", help="another surrogate for the model, with a default threshold of its own")
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
        if args.serve:
            serve(model, args.surrogate, args.port or 30000)
        return run_demo(model, args.surrogate, args.port or free_port(), args.example)
    except (DemoError, ServerError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
