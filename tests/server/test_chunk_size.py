"""Dense prefill: how a prompt is cut into chunks changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvzap_sglang.observe import unpack_kept
from kvzap_sglang.surrogates import shipped_surrogate
from tests.compare import assert_same_generation
from tests.servers import model_path, serve
from tests.texts import real_text_prompts

pytestmark = pytest.mark.server

MODEL = "SmolLM2-135M-Instruct-fp32"
# The first is compared with the others; the sizes for the default, the extremes for sparse.
CHUNKS = {"dense": (2048, 256, 64), "sparse": (2048, 64)}


def run(chunk: int, log: Path, prefill: str) -> list[dict[str, Any]]:
    press = ("--kv-press", "kvzap", "--kv-press-model", str(shipped_surrogate("mlp")), "--kv-press-threshold", "-3")
    flags = ("--dtype", "float32", "--max-total-tokens", "4096", "--kv-press-prefill", prefill)
    calls = [
        {"input_ids": p, "max_new_tokens": 24, "custom": {"return_kept": True}, "logprob": True}
        for p in real_text_prompts(2, 700 if prefill == "dense" else 350)
    ]
    with serve(model_path(MODEL), log, *flags, *press, "--chunked-prefill-size", str(chunk)) as server:
        alone = [server.generate(**call) for call in calls]
        server.flush()
        # Together: chunks of different requests share a batch, boundaries move.
        return alone + server.generate_all(calls)


@pytest.mark.parametrize("prefill", sorted(CHUNKS))
def test_chunk_size_does_not_matter(prefill: str, tmp_path: Path) -> None:
    reference, *others = [run(chunk, tmp_path / f"{chunk}.log", prefill) for chunk in CHUNKS[prefill]]
    for answers in others:
        for expected, answer in zip(reference, answers, strict=True):
            assert_same_generation(expected, answer, tolerance=1e-3)
            kept, wanted = (unpack_kept(a["meta_info"]["kv_press"]) for a in (answer, expected))
            # Scores differ by rounding only: a handful of the pairs lie within 1e-4 of the threshold.
            assert (kept[:700] != wanted[:700]).mean() < 2e-4
