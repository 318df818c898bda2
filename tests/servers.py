"""Real SGLang servers for tests: started as a user starts them, stopped for sure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

MODELS = Path(os.environ.get("KVZAP_TEST_MODELS", Path(__file__).parents[1] / "models"))
START_SECONDS = 240
BASE_FLAGS = ("--device", "cpu", "--host", "127.0.0.1", "--skip-server-warmup")
LEAK_WORDS = ("leak detected", "memory leak", "pool-bytes", "Traceback", "kv press: node", "double free")


def model_path(name: str) -> str:
    """A model folder that `make models` prepares; skips the test where it is missing."""
    path = MODELS / name
    if not (path / "config.json").is_file():
        pytest.skip(f"{path} is missing: run `make models`")
    return str(path)


@dataclass
class Server:
    """A running server."""

    url: str
    log_path: Path
    process: subprocess.Popen[bytes]

    def generate(
        self,
        input_ids: list[int],
        max_new_tokens: int,
        *,
        custom: Any = None,
        logprob: bool = False,
        **params: Any,
    ) -> dict[str, Any]:
        """One greedy `/generate` call; the JSON answer. Raises for HTTP errors with the server's text."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **params}
        if custom is not None:
            sampling["custom_params"] = {"kv_press": custom}
        body: dict[str, Any] = {"input_ids": input_ids, "sampling_params": sampling}
        if logprob:
            body |= {"return_logprob": True, "top_logprobs_num": 2}
        answer = requests.post(f"{self.url}/generate", json=body, timeout=600)
        if not answer.ok:
            raise RuntimeError(f"{answer.status_code}: {answer.text}")
        return answer.json()

    def generate_all(self, calls: list[dict[str, Any]], workers: int = 8) -> list[dict[str, Any]]:
        """`generate(**call)` for each, concurrently, answers in order."""
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(lambda call: self.generate(**call), calls))

    def press_info(self) -> dict[str, Any]:
        """`internal_states[0].kv_press` of `/server_info`."""
        return requests.get(f"{self.url}/server_info", timeout=60).json()["internal_states"][0]["kv_press"]

    def flush(self) -> None:
        """`/flush_cache`, waiting until the server is idle enough to accept it."""
        for _ in range(100):
            if requests.post(f"{self.url}/flush_cache", timeout=60).ok:
                return
            time.sleep(0.1)
        raise RuntimeError("the server refused to flush its cache for 10 s")

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def check_healthy(self) -> None:
        """Raises when the server died or logged a leak or a traceback."""
        if self.process.poll() is not None:
            raise AssertionError(f"server exited with {self.process.returncode}:\n{self.log()[-4000:]}")
        text = self.log()
        for word in LEAK_WORDS:
            if (
                word in text
                and "freeze_gc" not in text[max(0, text.index(word) - 3000) : text.index(word) + 3000]
            ):
                raise AssertionError(
                    f"{word!r} in the log:\n{text[max(0, text.index(word) - 1500) :][:5000]}"
                )


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """What a server of the tests runs with: one thread, offline, SGLang's strictest memory checks."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2",
        **(extra or {}),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(model: str, log_path: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server for the duration of a `with` block."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--port", str(port)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, *BASE_FLAGS, *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(env),
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log_path, process)
    try:
        _wait(server)
        yield server
        server.check_healthy()
    finally:
        _stop(process)


def failed_start(model: str, log_path: Path, *flags: str, env: dict[str, str] | None = None) -> str:
    """Log of a server that must not come up. Raises when it does."""
    try:
        with serve(model, log_path, *flags, env=env):
            pass
    except RuntimeError:
        return log_path.read_text(errors="replace")
    raise AssertionError("the server started")


def _wait(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"server exited with {server.process.returncode}:\n{server.log()[-6000:]}")
        try:
            if requests.get(f"{server.url}/health", timeout=5).ok:
                return
        except requests.RequestException:
            time.sleep(0.3)
    raise TimeoutError(f"not healthy after {START_SECONDS} s:\n{server.log()[-6000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number, patience in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
