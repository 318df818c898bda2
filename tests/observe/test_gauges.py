"""Token slots and cells are two meters: what is reported says which is full, and shows that pruning took place."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.scheduler_components.pool_stats_observer import SchedulerPoolStatsObserver

from kvzap_sglang.hooks.report import physical_usage
from kvzap_sglang.observe.log_line import press_message
from tests.memory.simulator import Request, Simulator


@pytest.mark.parametrize(("removed", "cells_in_use"), [(0.0, 60), (1.0, 11)])
def test_usage_is_that_of_the_fuller_meter(removed: float, cells_in_use: int) -> None:
    """60 tokens of one running request over 100 dense tokens of room and 200 token slots; a window of 10 and the last token."""
    random.seed(1)
    torch.manual_seed(1)
    simulator = Simulator(physical=100, headroom=2, window=10, lag=0, removed=removed, sparse=False)
    assert simulator.admit(Request(1, list(range(60)), 9)) and simulator.prefill_chunk(99)
    observer = SimpleNamespace(
        token_to_kv_pool_allocator=simulator.allocator, tree_cache=simulator.tree, max_total_num_tokens=200
    )
    logical = SchedulerPoolStatsObserver._get_token_info(observer)
    assert logical.full_token_usage == pytest.approx(60 / 200)
    reported = physical_usage(logical, observer)
    assert reported.full_num_used == 60
    assert reported.full_token_usage == pytest.approx(max(60 / 200, cells_in_use / 100))
    assert press_message(simulator.allocator).endswith(f"60 tokens in {cells_in_use} of 100")
