"""Real SGLang servers for tests: started as a user starts them, stopped for sure."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from kvzap_sglang.local_server import LocalServer, ServerError, local_server

MODELS = Path(os.environ.get("KVZAP_TEST_MODELS", Path(__file__).parents[1] / "models"))
BASE_FLAGS = ("--device", "cpu", "--skip-server-warmup", "--sleep-on-idle")
LEAK_WORDS = ("leak detected", "memory leak", "pool-bytes", "Traceback", "kv press: node", "double free")


def model_path(name: str) -> str:
    """A model folder that `make models` prepares; skips the test where it is missing."""
    path = MODELS / name
    if not (path / "config.json").is_file():
        pytest.skip(f"{path} is missing: run `make models`")
    return str(path)


class Server(LocalServer):
    """A running server with the calls that tests make."""

    def generate(
        self,
        input_ids: list[int],
        max_new_tokens: int,
        *,
        custom: Any = None,
        logprob: bool = False,
        extra_key: str | None = None,
        timeout: float = 1500,
        **params: Any,
    ) -> dict[str, Any]:
        """One greedy `/generate` call; the JSON answer. Raises for HTTP errors with the server's text.

        `extra_key`: prefixes are shared only under the same one; a fresh one makes a run cold.
        """
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **params}
        if custom is not None:
            sampling["custom_params"] = {"kv_press": custom}
        body: dict[str, Any] = {"input_ids": input_ids, "sampling_params": sampling}
        if extra_key is not None:
            body["extra_key"] = extra_key
        if logprob:
            body |= {"return_logprob": True, "top_logprobs_num": 2}
        answer = requests.post(f"{self.url}/generate", json=body, timeout=timeout)
        if not answer.ok:
            raise RuntimeError(f"{answer.status_code}: {answer.text}")
        return answer.json()

    def generate_all(self, calls: list[dict[str, Any]], workers: int = 8) -> list[dict[str, Any]]:
        """`generate(**call)` for each, concurrently, answers in order."""
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(lambda call: self.generate(**call), calls))

    def press_info(self) -> dict[str, Any]:
        """`internal_states[0].kv_press` of `/server_info`."""
        return requests.get(f"{self.url}/server_info", timeout=600).json()["internal_states"][0]["kv_press"]

    def wait_idle(self) -> dict[str, Any]:
        """`press_info` once nothing but the tree holds cells. Raises when that takes over 20 s."""
        for _ in range(200):
            info = self.press_info()
            if info["cells_free"] + info["cells_tree"] == info["cells_total"]:
                return info
            time.sleep(0.1)
        raise AssertionError(f"cells are missing: {info}")

    def flush(self) -> None:
        """`/flush_cache`, waiting until the server is idle enough to accept it."""
        for _ in range(100):
            if requests.post(f"{self.url}/flush_cache", timeout=600).ok:
                return
            time.sleep(0.1)
        raise RuntimeError("the server refused to flush its cache for 10 s")

    def check_healthy(self) -> None:
        """Raises when the server died or logged a leak or a traceback."""
        if self.process.poll() is not None:
            raise AssertionError(f"server exited with {self.process.returncode}:\n{self.log()[-4000:]}")
        text = self.log()
        for word in LEAK_WORDS:
            for match in re.finditer(re.escape(word), text):
                # SGLang's own start-up may fail to reach itself for `/freeze_gc`, which is harmless.
                if "freeze_gc" not in text[max(0, match.start() - 3000) : match.start() + 3000]:
                    raise AssertionError(f"{word!r} in the log:\n{text[max(0, match.start() - 1500) :][:5000]}")


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """What a server of the tests runs with: one thread, offline, SGLang's strictest memory checks."""
    return {
        "OMP_NUM_THREADS": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2",
        **(extra or {}),
    }


@contextmanager
def serve(model: str, log_path: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server for the duration of a `with` block; healthy at its end too."""
    with local_server(model, log_path, [*BASE_FLAGS, *flags], env=environment(env)) as started:
        server = Server(started.url, started.log_path, started.process)
        yield server
        server.check_healthy()


def failed_start(model: str, log_path: Path, *flags: str, env: dict[str, str] | None = None) -> str:
    """Log of a server that must not come up. Raises when it does."""
    try:
        with serve(model, log_path, *flags, env=env):
            pass
    except ServerError:
        return log_path.read_text(errors="replace")
    raise AssertionError("the server started")
