"""The two regressions of the KVzap recipe (arXiv 2601.07891, app. A), one layer at a time.

A layer's input predicts its heads' targets. The recipe trains the MLPs of all layers together; here each layer is
trained by itself, so that one layer's inputs are in memory and not all. Only the clipping of the gradient's norm coupled
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvzap_sglang.calibrate.collect import Collected

RIDGE_ALPHA = 1.0
_EVALUATION_BATCH = 8192
_WEIGHTS_WORTH_THREADS = 1 << 18


@dataclass(frozen=True)
class MlpSettings:
    """hidden_dim: width, D / 8 in the paper. The rest as in the recipe: AdamW, cosine from `learning_rate` to 0 by epoch."""

    hidden_dim: int
    epochs: int = 15
    learning_rate: float = 5e-3
    batch: int = 512
    clip: float = 1.0
    seed: int = 0


def ridge(collected: Collected, layer: int) -> nn.Linear:
    """Least squares with an L2 penalty of 1 on the weights, none on the bias, by the normal equations in float64."""
    count, sums, moments, crossed, means = 0, torch.zeros(0), torch.zeros(0), torch.zeros(0), torch.zeros(0)
    for hidden, targets in collected.prompts(layer):
        x, y = hidden.double(), targets.double()
        if not count:
            size, heads = x.shape[1], y.shape[1]
            sums, means = torch.zeros(size, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
            moments, crossed = sums.new_zeros(size, size), sums.new_zeros(size, heads)
        count += len(x)
        sums += x.sum(0)
        means += y.sum(0)
        moments.addmm_(x.T, x)
        crossed.addmm_(x.T, y)
    x_mean, y_mean = sums / count, means / count
    gram = moments - count * torch.outer(x_mean, x_mean) + RIDGE_ALPHA * torch.eye(len(sums), dtype=torch.float64)
    weight = torch.linalg.solve(gram, crossed - count * torch.outer(x_mean, y_mean)).T
    linear = nn.Linear(*weight.shape[::-1])
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(y_mean - weight @ x_mean)
    return linear


def mlp(collected: Collected, layer: int, settings: MlpSettings, device: str) -> nn.Sequential:
    """`Linear, GELU (erf), Linear` by mean squared error over tokens and heads."""
    hidden, targets = (tensor.to(device) for tensor in collected.layer(layer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed + layer)
        model = nn.Sequential(
            nn.Linear(hidden.shape[1], settings.hidden_dim),
            nn.GELU(approximate="none"),
            nn.Linear(settings.hidden_dim, targets.shape[1]),
        ).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=settings.epochs)
    generator = torch.Generator().manual_seed(settings.seed + layer)
    with _threads_for(hidden.shape[1] * settings.hidden_dim):
        for _ in range(settings.epochs):
            for rows in torch.randperm(len(hidden), generator=generator).to(device).split(settings.batch):
                loss = nn.functional.mse_loss(model(hidden[rows].float()), targets[rows])
                optimiser.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
                optimiser.step()
            schedule.step()
    return model.cpu()


@contextmanager
def _threads_for(weights: int) -> Iterator[None]:
    """One CPU thread for small layers: 576 x 72 took 21 s on two threads and 17 s on one (128,000 pairs, 15 epochs)."""
    before = torch.get_num_threads()
    try:
        if weights < _WEIGHTS_WORTH_THREADS:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def predict(model: nn.Module, hidden: Tensor) -> Tensor:
    """float32 `[N, H]` for inputs `[N, D]` of any dtype."""
    return torch.cat([model(rows.float()) for rows in hidden.split(_EVALUATION_BATCH)])
