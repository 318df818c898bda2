"""As much of a server as the evaluation speaks to: it counts, remembers prefixes, and answers what it is told to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

KEPT = 0.4


class FakeServer:
    """`answer`: token ids -> text. `calls`: bodies of `/generate`. `evict`: forget the next so many cached prefixes."""

    def __init__(self, answer: Callable[[list[int]], str], config: dict[str, Any] | None = None) -> None:
        self.answer, self.evict = answer, 0
        self.calls: list[dict[str, Any]] = []
        self.config = {
            "kv_press": "kvzap", "kv_press_prefill": "dense", "kv_press_decode": "prune", "kv_press_lock": False, "kv_press_window": 128, **(config or {}),
        }  # fmt: skip
        self.url = ""
        self.prefixes: list[tuple[str, tuple[int, ...]]] = []
        self._lock = Lock()

    def info(self) -> dict[str, Any]:
        press = {"config": self.config, "digest": "fake"}
        return {"model_path": "model", "internal_states": [{"kv_press": press}]}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = tuple(body["input_ids"])
        custom = json.dumps([body["sampling_params"].get("custom_params"), body.get("extra_key")])
        with self._lock:
            self.calls.append(body)
            cached = max((len(p) for key, p in self.prefixes if key == custom and ids[: len(p)] == p), default=0)
            if self.evict and cached:
                self.evict -= 1
                cached = 0
                self.prefixes.clear()
            else:
                self.prefixes.append((custom, ids))
        off = body["sampling_params"].get("custom_params") == {"kv_press": "off"}
        meta: dict[str, Any] = {"cached_tokens": min(cached, len(ids) - 1) if cached == len(ids) else cached}
        meta["kv_press"] = {"kept_fraction": 1.0 if off else KEPT}
        if body.get("return_logprob"):
            step = [[-0.1, 7, None], [-3.0, 8, None]] if off else [[-0.5, 7, None], [-3.0, 8, None]]
            start = body.get("logprob_start_len")
            meta["input_top_logprobs"] = [None] + [step] * (len(ids) - (start or 0) - 1)
            meta["output_top_logprobs"] = [step] * 2
        return {"text": self.answer(list(ids)), "output_ids": [1, 2] if off else [1, 3], "meta_info": meta}


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(server.info())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._reply(server.generate(body))

        def _reply(self, value: dict[str, Any]) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{httpd.server_port}"
    thread = Thread(target=httpd.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()
