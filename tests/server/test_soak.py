"""Small requests (5,000 in the full soak) that end in every way, on a pool of 1.2 requests, under forced retraction."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from tests.compare import assert_same_generation
from tests.server.conftest import WINDOW
from tests.servers import Server, model_path, serve
from tests.soak import ENDINGS, Soak
from tests.surrogates import tiny_press

pytestmark = pytest.mark.server

# The full soak is KVZAP_SOAK_REQUESTS=5000; every run of all tests does a tenth of it.
REQUESTS, WAVES, PROBES = int(os.environ.get("KVZAP_SOAK_REQUESTS", "500")), 5, 4
LONGEST, NEW_TOKENS = 120, 12
ROOM = (LONGEST + NEW_TOKENS) * 6 // 5


@pytest.mark.parametrize("prefill", ["dense", "sparse"])
def test_soak(prefill: str, tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--chunked-prefill-size", "64", "--max-running-requests", "8")
    flags += ("--max-total-tokens", str(ROOM), "--kv-press-prefill", prefill, *tiny_press(tmp_path / "s"))
    env = {"SGLANG_TEST_RETRACT": "1"}
    with serve(model_path("tiny-llama-random"), tmp_path / "server.log", *flags, env=env) as server:
        soak = Soak(server.url, LONGEST, NEW_TOKENS, seed=1)
        start = time.monotonic()
        for _ in range(WAVES):
            asyncio.run(soak.run(REQUESTS // WAVES, PROBES, workers=16))
            server.wait_idle()
            server.check_healthy()
        print(f"{prefill}: {REQUESTS} requests in {time.monotonic() - start:.0f} s")
        check_what_happened(soak)
        compared = check_probes(server, soak)
        server.flush()
        info = server.press_info()
        assert info["cells_free"] == info["cells_total"] and info["cells_tree"] == 0
        assert info["pruned_cells_total"] > 0 and info["evicted_cells_total"] > 0
    print(f"{dict(soak.tally.ends)}, {soak.tally.retractions} retractions, {compared} steps of probes compared")


def check_what_happened(soak: Soak) -> None:
    """Each ending came about often, or the soak proves little."""
    ends = soak.tally.ends
    assert sum(ends.values()) > 0.95 * REQUESTS
    reached = {"length": "length", "stop token": "stop", "stop string": "stop", "abort": "abort", "disconnect": "left"}
    assert reached.keys() == set(ENDINGS)
    for asked, reason in reached.items():
        assert ends[asked, reason] > 0.02 * REQUESTS, ends
    assert soak.tally.retractions > 0.01 * REQUESTS
    assert soak.tally.polls > 10


def check_probes(server: Server, soak: Soak) -> int:
    """Probes answered in the crowd as alone. A retracted one finds its own prompt in the tree, settled past its
    window: it is held to that only where nothing had left the window yet. Returns the steps compared."""
    compared = 0
    for prompt, new_tokens, answer in soak.tally.probes:
        if answer["meta_info"]["num_retractions"] and len(prompt) + new_tokens > WINDOW:
            continue
        server.flush()
        alone = server.generate(prompt, new_tokens, logprob=True, timeout=600)
        compared += assert_same_generation(alone, answer, tolerance=2e-3)
    assert compared > 2 * len(soak.tally.probes)
    return compared
