"""SGLang's timeout kits: requests that wait or run too long are ended, and every cell of theirs comes back."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sglang.test.kits.abort_timeout_kit import RunningTimeoutTwoWaveMixin, WaitingTimeoutMixin

from tests.servers import Server, model_path, serve
from tests.surrogates import tiny_press

pytestmark = pytest.mark.server


class TimeoutCase(unittest.TestCase):
    """What the kits find on their host class. The server has ended some requests and answers the next one."""

    env: ClassVar[dict[str, str]]
    running: ClassVar[str]
    ended_by: ClassVar[str]
    server: ClassVar[Server]
    base_url: ClassVar[str]
    process: ClassVar[Any]

    def tearDown(self) -> None:
        info = self.server.wait_idle()
        assert self.ended_by in self.server.log()
        assert len(self.server.generate(list(range(100, 160)), 4)["output_ids"]) == 4
        self.server.flush()
        assert self.server.press_info()["cells_free"] == info["cells_total"]


@pytest.fixture(scope="class")
def timed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A pruning server of the tiny model with the class' timeout."""
    case, folder = request.cls, tmp_path_factory.mktemp("timeouts")
    flags = ("--dtype", "float32", "--max-total-tokens", "20000", "--max-running-requests", case.running)
    log: Path = folder / "server.log"
    with serve(model_path("tiny-llama-random"), log, *flags, *tiny_press(folder / "s"), env=case.env) as server:
        case.server, case.base_url, case.process = server, server.url, server.process
        yield
        assert server.press_info()["pruned_cells_total"] > 0


@pytest.mark.usefixtures("timed")
class TestWaiting(WaitingTimeoutMixin, TimeoutCase):
    """One request at a time: of two, the second waits longer than it may."""

    env: ClassVar[dict[str, str]] = {"SGLANG_REQ_WAITING_TIMEOUT": "0.5"}
    running, ended_by = "1", "503"


@pytest.mark.usefixtures("timed")
class TestRunning(RunningTimeoutTwoWaveMixin, TimeoutCase):
    """Two waves that both run longer than they may, in steps of their own."""

    env: ClassVar[dict[str, str]] = {"SGLANG_REQ_RUNNING_TIMEOUT": "3"}
    running, ended_by = "16", "503"
    running_timeout_sleep = 1.5
