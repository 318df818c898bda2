"""Streaming and random: the baselines' scores."""

from __future__ import annotations

import math

import pytest
import torch

from kvzap_sglang.presses.base import LayerInput
from kvzap_sglang.presses.random import RandomPress
from kvzap_sglang.presses.streaming import StreamingPress


def inputs(n: int, seed: int = 0) -> LayerInput:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50000, (n,), generator=generator)
    return LayerInput(torch.zeros(n, 8), torch.arange(n), ids)


def test_streaming_scores_are_below_its_threshold() -> None:
    scores = StreamingPress(3).score(5, inputs(7))
    assert scores.shape == (7, 3)
    assert (scores < math.inf).all() and not (scores < -math.inf).any()


@pytest.mark.parametrize("removed", [0.1, 0.5, 0.66, 0.9])
def test_random_removes_exp_of_the_threshold(removed: float) -> None:
    press, threshold = RandomPress(4), math.log(removed)
    fractions = [(press.score(layer, inputs(4000)) < threshold).float().mean(0) for layer in range(6)]
    assert torch.stack(fractions).sub(removed).abs().max() < 0.04
    assert abs(torch.stack(fractions).mean().item() - removed) < 0.01


def test_random_of_a_deep_model() -> None:
    """Layers far beyond the tiny models' two: int64 arithmetic wraps, Python's does not."""
    press, sample = RandomPress(heads=8), inputs(4000)
    scores = torch.stack([press.score(layer, sample) for layer in (0, 3, 4, 29, 63, 127)])
    assert ((scores < math.log(0.3)).float().mean(dim=(1, 2)) - 0.3).abs().max() < 0.02
    assert torch.corrcoef(scores.flatten(1)).triu(1).abs().max() < 0.05


def test_random_depends_on_token_position_layer_and_head_only() -> None:
    press, sample = RandomPress(4), inputs(64)
    scores = press.score(3, sample)
    assert torch.equal(scores, press.score(3, LayerInput(torch.ones(64, 8), *sample[1:])))
    assert torch.equal(scores[10:20], press.score(3, LayerInput(*(t[10:20] for t in sample))))
    assert not torch.equal(scores, press.score(4, sample))
    assert not torch.equal(scores, press.score(3, sample._replace(positions=sample.positions + 1)))
    assert not torch.equal(scores, press.score(3, sample._replace(token_ids=sample.token_ids + 1)))
    assert len({tuple(column.tolist()) for column in scores.T}) == 4


def test_random_heads_of_a_rank_equal_the_whole() -> None:
    whole, part = RandomPress(4).score(1, inputs(32)), RandomPress(2, first_head=2).score(1, inputs(32))
    assert torch.equal(whole[:, 2:], part)


@pytest.mark.parametrize("press", [RandomPress(2), StreamingPress(2)])
def test_zero_tokens(press: RandomPress | StreamingPress) -> None:
    assert press.score(0, inputs(0)).shape == (0, 2)


def test_random_columns_are_uncorrelated() -> None:
    scores = torch.stack([RandomPress(4).score(layer, inputs(4000)) for layer in range(4)]).permute(0, 2, 1)
    matrix = torch.corrcoef(scores.reshape(16, -1))
    assert (matrix - torch.eye(16)).abs().max() < 0.08
