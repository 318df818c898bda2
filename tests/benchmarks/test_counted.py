"""The bytes that are counted, by hand; the spread that is drawn, against what was measured."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu_check.counted import BEGIN, CHUNK, END, decode_traffic, floor_bytes, requirement_holds, summary
from benchmarks.gpu_check.shapes import MODELS, QWEN3_8B
from benchmarks.gpu_check.spread import DEVIATION, kept_fractions
from kvzap_sglang.attention import device_lists

from .test_gpu_check import ROOT


def test_bytes_of_one_shape_by_hand() -> None:
    """Qwen3-8B, one request of 2048 positions, half kept, chunks of 512: 8192 pairs a layer in 4 x 8 lists."""
    found = decode_traffic(QWEN3_8B, 1, 2048, 0.5)
    assert found.kv_rows == 36 * 8192 * 512
    assert found.lists_written == 36 * (4 * 8192 + 4 * 32)
    assert found.lists_read == 36 * (4 * 8192 + 2 * 4 * 32)
    assert found.table_read == 36 * 4 * 2048 * 8 and found.slots_read == 36 * 4 * 2048
    assert found.partials == 36 * 2 * (4 * 32 * 129 * 4)
    # Per pair: K and V read and written (1024), entry, score, bit (7); per token 12; 4 of 8 condemned entries written.
    assert found.new_tokens == 36 * (8 * 1031 + 12 + 4 * 4)
    assert found.queries == 36 * (32 * 128 * 2 * 2 + 32 * 4)
    assert found.bookkeeping == 288 * 8 + (288 * 4 + 36 * 4 * 8) + (288 + 36 + 64) + 16
    parts_of = (
        "kv_rows",
        "lists_written",
        "lists_read",
        "table_read",
        "slots_read",
        "partials",
        "new_tokens",
        "queries",
    )
    assert found.total == sum(getattr(found, name) for name in parts_of) + found.bookkeeping
    assert floor_bytes(QWEN3_8B, found) == (
        QWEN3_8B.weight_bytes + QWEN3_8B.surrogate_bytes + found.kv_rows + found.lists_written + found.lists_read
    )


def test_weights_are_those_that_are_published() -> None:
    """Surrogates by the paper's counts; models without the input embedding."""
    surrogates = {"Qwen3-8B": 75.66e6, "Llama-3.1-8B": 1.05e6, "Qwen3-32B": 210.08e6}
    models = {"Qwen3-8B": 8.19e9 - 0.62e9, "Llama-3.1-8B": 8.03e9 - 0.525e9, "Qwen3-32B": 32.8e9 - 0.78e9}
    for model in MODELS:
        assert model.surrogate_bytes / 2 == pytest.approx(surrogates[model.name], rel=0.005)
        assert model.weight_bytes / 2 == pytest.approx(models[model.name], rel=0.005)


def test_the_servers_lists_are_counted() -> None:
    assert CHUNK == device_lists.CHUNK


def test_lists_and_table_are_at_most_5_percent_at_a_third_kept() -> None:
    assert all(requirement_holds(model) for model in MODELS)
    assert decode_traffic(QWEN3_8B, 8, 32768, 0.33).overhead == pytest.approx((8 + 4.5 / 0.33) / 512, rel=0.01)
    assert decode_traffic(QWEN3_8B, 8, 32768, 0.25).overhead > 0.05  # what is said is not said of everything


@pytest.mark.parametrize("mean", [0.5, 0.33, 0.25])
def test_kept_fractions_have_the_mean_and_about_the_measured_spread(mean: float) -> None:
    found = kept_fractions(mean, 64, 8, 3)
    assert found.shape == (64, 8) and found.mean() == pytest.approx(mean, abs=1e-6)
    assert found.min() >= 0 and found.max() <= 1 and found.std() == pytest.approx(DEVIATION, abs=0.06)
    assert np.array_equal(found, kept_fractions(mean, 64, 8, 3)) and (kept_fractions(1.0, 3, 2, 0) == 1).all()


def test_the_documentation_holds_the_table_as_it_is_counted() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert text.split(BEGIN)[1].split(END)[0].strip() == summary().strip()
