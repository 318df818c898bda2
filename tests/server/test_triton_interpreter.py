"""A real server whose Triton kernels run in Triton's interpreter answers as the CPU backend does."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from kvzap_sglang.observe import unpack_kept
from tests.compare import assert_same_generation
from tests.servers import Server, model_path, serve
from tests.surrogates import make_surrogate
from tests.workloads import tokens

pytestmark = pytest.mark.server

FLAGS = (
    "--dtype",
    "float32",
    "--max-total-tokens",
    "900",
    "--max-running-requests",
    "4",
    "--chunked-prefill-size",
    "64",
)


def run(server: Server) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Chunks, a second turn, branches inside a pruned prefix, four together; then the idle pool."""
    rng = random.Random(4)
    base = tokens(rng, 150)
    prompts = [base, base + tokens(rng, 9), base[:90] + tokens(rng, 20), base[:90] + tokens(rng, 7), tokens(rng, 1)]
    calls = [
        {"input_ids": prompt, "max_new_tokens": 12, "logprob": True, "custom": {"return_kept": True}}
        # The four that run together share nothing: what they would find in the tree depends on who is first.
        for prompt in [*prompts, *(tokens(rng, 30 + 40 * n) for n in range(4))]
    ]
    answers = [server.generate(**call) for call in calls[:5]] + server.generate_all(calls[5:])
    calls[0] |= {"input_ids": [*base, *answers[0]["output_ids"], *tokens(rng, 30)]}
    answers.append(server.generate(**calls[0]))
    info = server.wait_idle()
    server.flush()
    assert server.press_info()["cells_free"] == info["cells_total"]
    return answers, info


# The other pair costs three minutes of every run; both rules are compared step by step in tests/attention.
PAIRS = [("tiny-llama-random", "dense"), ("tiny-qwen3-random", "sparse")][
    : 2 if os.environ.get("KVZAP_ALL_PAIRS") else 1
]


@pytest.mark.parametrize(("model", "prefill"), PAIRS)
def test_equals_the_cpu_backend(model: str, prefill: str, tmp_path: Path) -> None:
    surrogate = make_surrogate(tmp_path / "surrogate", hidden=64, layers=2, kv_heads=2, hidden_dim=32)
    press = ("--kv-press", "kvzap", "--kv-press-model", str(surrogate), "--kv-press-threshold=0")
    press += ("--kv-press-window", "32", "--kv-press-prefill", prefill)
    with serve(model_path(model), tmp_path / "cpu.log", *FLAGS, *press) as server:
        expected, host = run(server)
    interpreted = {"TRITON_INTERPRET": "1"}
    flags = (*FLAGS, *press, "--kv-press-attention", "triton")
    with serve(model_path(model), tmp_path / "triton.log", *flags, env=interpreted) as server:
        answers, device = run(server)
    for theirs, ours in zip(expected, answers, strict=True):
        assert_same_generation(theirs, ours, tolerance=1e-4)
        kept, wanted = (unpack_kept(answer["meta_info"]["kv_press"]) for answer in (ours, theirs))
        assert (kept == wanted).all()
    cached = [[answer["meta_info"]["cached_tokens"] for answer in side] for side in (expected, answers)]
    assert cached[0] == cached[1] and max(cached[0]) > 80
    assert device["pruned_cells_total"] > 200 and "counters" in device["buffer_bytes"]
    assert device["config"]["kv_press_attention"] == "triton" and host["config"]["kv_press_attention"] == "auto"
