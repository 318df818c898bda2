"""The decode benchmark measures what it says: same rows for kernel and read, every contestant the same attention."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.decode_attention import LAYOUTS, Shape, contestants, make_layer, measure, report
from kvzap_sglang.kernels.cpu import build

WHOLE = Shape(batch=2, q_heads=6, kv_heads=2, dim=32, context=60, kept=1.0)


def test_with_everything_visible_the_kernel_gives_what_torch_gives(rng: torch.Generator) -> None:
    layer = make_layer(WHOLE, torch.float32)
    visible = layer.visible["head-major"]
    every = torch.arange(4 * 60, dtype=torch.int32)
    layer.visible["head-major"] = visible._replace(indptr=torch.arange(5) * 60, cells=every)
    timed = contestants(WHOLE)
    out = timed["kernel head-major"](layer)[0]
    for name in ("sdpa, group as rows", "sdpa, enable_gqa"):
        torch.testing.assert_close(timed[name](layer).reshape(out.shape), out, rtol=1e-4, atol=1e-5)


def test_layouts_hold_the_same_number_of_distinct_rows(rng: torch.Generator) -> None:
    layer = make_layer(Shape(2, 6, 2, 32, 100, 0.35), torch.float32)
    for name in LAYOUTS:
        cells = layer.visible[name].cells
        assert (
            cells.numel() == cells.unique().numel() == int(layer.visible[name].indptr[-1]) == pytest.approx(140, abs=4)
        )
        assert int(cells.min()) >= 0 and int(cells.max()) < 400


@pytest.mark.skipif(build.library() is None, reason="the kernels do not compile here")
def test_measures_and_reports_every_contestant(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = measure(Shape(2, 6, 2, 32, 100, 0.35), torch.bfloat16, layers=2, rounds=3, clock=time.perf_counter)
    assert len(seconds) == 8 and all(len(times) == 3 and min(times) > 0 for times in seconds.values())
    report(WHOLE, torch.bfloat16, seconds)
    assert "of a pure read's bandwidth" in capsys.readouterr().out
