"""Threshold -inf gives stock SGLang's outputs, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compare import assert_same_generation
from tests.servers import model_path, serve
from tests.workloads import run_mixed

pytestmark = pytest.mark.server

SEED = 20260131
FLAGS = (
    "--dtype", "float32", "--max-total-tokens", "4096",
    "--max-running-requests", "8", "--chunked-prefill-size", "64",
)  # fmt: skip
PRESS = ("--kv-press", "streaming", "--kv-press-threshold=-inf")


@pytest.fixture(scope="module", params=["tiny-llama-random", "tiny-qwen3-random", "SmolLM2-135M-Instruct-fp32"])
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """(model folder, answers of stock SGLang)."""
    model = model_path(request.param)
    log = tmp_path_factory.mktemp("stock") / "server.log"
    with serve(model, log, *FLAGS, "--attention-backend", "torch_native") as server:
        return model, run_mixed(server, SEED)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_equals_stock(stock: tuple[str, Any], overlap: bool, tmp_path: Path) -> None:
    model, expected = stock
    flags = (*FLAGS, *PRESS, *(() if overlap else ("--disable-overlap-schedule",)))
    with serve(model, tmp_path / "server.log", *flags) as server:
        answers = run_mixed(server, SEED, second_turns=[a["prompt"] for a in expected[-6:]])
        info = server.press_info()
        server.flush()
        assert server.press_info()["cells_free"] == info["cells_total"]
    compared = sum(
        assert_same_generation(theirs, ours, tolerance=1e-4) for theirs, ours in zip(expected, answers, strict=True)
    )
    assert compared > 0.8 * sum(len(a["output_ids"]) for a in expected)
    cached = [[a["meta_info"]["cached_tokens"] for a in side] for side in (expected, answers)]
    assert cached[0][:12] == cached[1][:12]  # sequential: what is cached does not depend on timing
    assert cached[0][-6:] == cached[1][-6:]
    assert info["pruned_cells_total"] == 0
