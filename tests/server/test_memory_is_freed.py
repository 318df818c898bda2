"""What pruning frees admits more requests, and nothing leaks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvzap_sglang.surrogates import shipped_surrogate
from tests.servers import Server, model_path, serve
from tests.texts import prose_prompts

pytestmark = pytest.mark.server

# float32: processors without bf16 arithmetic run it several times faster than bfloat16.
ROOM = ("--max-total-tokens", "4096", "--chunked-prefill-size", "2048", "--decode-log-interval", "1")
ROOM += ("--dtype", "float32")


def peak_running(server: Server) -> int:
    """Largest number of requests that decoded together, from SGLang's own log lines."""
    return max(int(n) for n in re.findall(r"Decode batch.*?#running-req: (\d+)", server.log()))


def run_together(server: Server, count: int) -> int:
    """The first `count` of sixteen requests of 1200 + 200 tokens, sent at once; the peak of running ones."""
    calls = [{"input_ids": p, "max_new_tokens": 200} for p in prose_prompts(16, 1200)[:count]]
    answers = server.generate_all(calls, workers=count)
    assert all(len(a["output_ids"]) == 200 for a in answers)
    return peak_running(server)


@pytest.mark.timeout(1800)
def test_twice_as_many_requests_run(tmp_path: Path) -> None:
    model = model_path("SmolLM2-135M-Instruct-fp32")
    press = ("--kv-press", "kvzap", "--kv-press-model", str(shipped_surrogate("mlp")), "--kv-press-threshold", "-3")
    with serve(model, tmp_path / "stock.log", *ROOM, "--attention-backend", "torch_native") as server:
        # Stock's peak is what 4096 tokens hold, however many wait: four save ten minutes.
        stock = run_together(server, 4)
    assert stock < 4
    with serve(model, tmp_path / "ours.log", *ROOM, *press) as server:
        ours = run_together(server, 10)
        server.flush()
        info = server.press_info()
        assert info["cells_free"] == info["cells_total"]
        assert info["cells_tree"] == 0
    print(f"peak running requests: stock {stock}, ours {ours}")
    assert ours >= 2 * stock
