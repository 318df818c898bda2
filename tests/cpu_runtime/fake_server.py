"""Stands in for a started SGLang server in the tests of the demo and the examples: same routes, canned figures.

    python fake_server.py PORT MODE     MODE: press | stock | dies | deaf

"deaf" ignores SIGTERM and leaves a child that does, too; its process id is printed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PRESS = {"kept_fraction": 0.375, "kept_cells": 3072, "dense_cells": 8192, "window": 128}


def chat_reply(request: dict[str, Any], press: bool) -> dict[str, Any]:
    """The reply of SGLang's chat endpoint to `return_meta_info`, as far as the examples read it."""
    turns = sum(message["role"] == "user" for message in request["messages"])
    meta: dict[str, Any] = {"prompt_tokens": 100 * turns, "cached_tokens": 90 * (turns - 1), "completion_tokens": 7}
    if press:
        meta["kv_press"] = PRESS
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": f"answer {turns}"},
    }
    if request.get("return_meta_info"):
        choice["meta_info"] = meta
    return {"id": "1", "object": "chat.completion", "created": 0, "model": request["model"], "choices": [choice]}


def handler(press: bool) -> type[BaseHTTPRequestHandler]:
    """A request handler class with or without the press's figures."""
    state = [{"kv_press": {"bytes_per_cell": 256}}] if press else [{}]
    pages: dict[str, Any] = {
        "/health": {},
        "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "x"}]},
        "/server_info": {"internal_states": state},
        "/v1/loads": {"loads": [{"num_running_reqs": 2}, {"num_running_reqs": 3}]},
    }

    class Handler(BaseHTTPRequestHandler):
        def reply(self, body: Any, code: int = 200) -> None:
            content = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            page = pages.get(self.path.split("?")[0])
            self.reply(page, 200) if page is not None else self.reply({"error": "no such page"}, 404)

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(chat_reply(request, press))

    return Handler


def main() -> None:
    """Serve until killed, or die or turn deaf as asked."""
    port, mode = int(sys.argv[1]), sys.argv[2]
    if mode == "dies":
        sys.exit("cannot load the model")
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), handler(press=mode == "press")).serve_forever()


if __name__ == "__main__":
    main()
