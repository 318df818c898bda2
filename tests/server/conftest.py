"""A server for both prefill modes that every test must leave as it was found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.servers import Server, model_path, serve
from tests.surrogates import tiny_press
from tests.workloads import tokens

WINDOW = 32
CHUNK = 64
LAYERS = 2
CELLS_PER_TOKEN = 2 * LAYERS
RUNNING = 2
"""Requests that the shared server runs together: a third one queues."""
ROOM = 6000


@dataclass
class Rig:
    """A running server, its prefill mode, and a request with the answer that it always gets."""

    server: Server
    prefill: str
    probe: list[int]
    expected: list[int]

    def check(self) -> None:
        """Nothing is lost, nothing was logged, everything can be freed, and the probe's answer is what it was."""
        info = self.server.wait_idle()
        self.server.check_healthy()
        self.server.flush()
        assert self.server.press_info()["cells_free"] == info["cells_total"]
        assert self.server.generate(self.probe, 2 * WINDOW, timeout=600)["output_ids"] == self.expected

    def cold(self, prompt: list[int], new_tokens: int) -> list[int]:
        """The answer to `prompt` on an empty cache."""
        self.server.flush()
        answer = self.server.generate(prompt, new_tokens, timeout=600)
        assert answer["meta_info"]["cached_tokens"] == 0
        return answer["output_ids"]


@pytest.fixture(scope="module", params=["dense", "sparse"])
def shared_rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Tiny Llama in fp32, about half of all pairs condemned, window 32, two requests at a time."""
    folder = tmp_path_factory.mktemp(request.param)
    flags = ("--dtype", "float32", "--chunked-prefill-size", str(CHUNK), "--max-running-requests", str(RUNNING))
    flags += ("--max-total-tokens", str(ROOM), "--kv-press-prefill", request.param)
    # Or a random model fills a JSON answer with blanks until it is cut.
    flags += ("--constrained-json-disable-any-whitespace",)
    with serve(model_path("tiny-llama-random"), folder / "server.log", *flags, *tiny_press(folder / "s")) as server:
        probe = tokens(random.Random(77), 3 * WINDOW + 5)
        yield Rig(server, request.param, probe, server.generate(probe, 2 * WINDOW)["output_ids"])


@pytest.fixture
def rig(shared_rig: Rig) -> Iterator[Rig]:
    """The module's server, checked after each test."""
    yield shared_rig
    shared_rig.check()
