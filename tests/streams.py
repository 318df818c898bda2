"""Requests that a test watches and leaves in a chosen state."""

from __future__ import annotations

import http.client
import json
import uuid
from types import TracebackType
from typing import Any

import requests

from tests.servers import Server


class Call:
    """A streaming greedy `/generate` request that is on its way; nothing is read unless asked for.

    Attributes:
        rid: the request's id at the server.
        last: the newest chunk read, None before the first.
    """

    def __init__(self, server: Server, input_ids: list[int], max_new_tokens: int, **params: Any) -> None:
        self.rid = uuid.uuid4().hex
        self.last: dict[str, Any] | None = None
        self._server = server
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **params}
        body = {"input_ids": input_ids, "stream": True, "rid": self.rid, "sampling_params": sampling}
        self._connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=600)
        self._connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        self._answer: http.client.HTTPResponse | None = None

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def read(self, tokens: int) -> bool:
        """Read until at least `tokens` were generated. False when the stream ended before."""
        if self._answer is None:
            self._answer = self._connection.getresponse()
        while self.last is None or self.last["meta_info"]["completion_tokens"] < tokens:
            line = self._answer.readline()
            if not line:
                return False
            if line.startswith(b"data: {"):
                self.last = json.loads(line[6:])
                assert self.last is not None and "error" not in self.last, self.last
        return True

    def abort(self) -> dict[str, Any]:
        """`/abort_request`, then the request's last chunk."""
        requests.post(f"{self._server.url}/abort_request", json={"rid": self.rid}, timeout=600).raise_for_status()
        self.read(1 << 30)
        assert self.last is not None, "an aborted stream ended without a chunk"
        return self.last

    def leave(self) -> None:
        """Close the connection, as a client does that has gone away."""
        if self._answer is not None:
            self._answer.close()
        self._connection.close()
