"""The two regressions and the figures about them, on data whose answer is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvzap_sglang.calibrate.checkpoint import load_layer, save_layer
from kvzap_sglang.calibrate.collect import Collected
from kvzap_sglang.calibrate.quality import r_squared, threshold_removing, threshold_table
from kvzap_sglang.calibrate.train import MlpSettings, mlp, predict, ridge

PROMPTS, TOKENS, SIZE, LAYERS, HEADS = 6, 200, 12, 2, 3


def write(folder: Path, targets_of: list[Tensor], hidden: Tensor) -> Collected:
    """One file a prompt; `hidden` `[P, t, L, D]`, `targets_of[p]` `[t, L, H]`."""
    files = []
    for index, targets in enumerate(targets_of):
        files.append(folder / f"{index}.safetensors")
        layers = {f"hidden.{i}": hidden[index, :, i].contiguous() for i in range(LAYERS)}
        save_file({**layers, "targets": targets.contiguous()}, files[-1])
    return Collected(files)


@pytest.fixture
def data(tmp_path: Path) -> tuple[Collected, Tensor, Tensor]:
    """Targets that bend with the inputs, and the true inputs `[N, L, D]` and targets `[N, L, H]`."""
    generator = torch.Generator().manual_seed(int(torch.randint(1 << 30, ()).item()))
    hidden = torch.randn(PROMPTS, TOKENS, LAYERS, SIZE, generator=generator).to(torch.bfloat16)
    weight = torch.randn(LAYERS, HEADS, SIZE, generator=generator)
    linear = torch.einsum("ptld,lhd->ptlh", hidden.float(), weight)
    targets = linear.abs() - 4 + 0.1 * torch.randn(linear.shape, generator=generator)
    return write(tmp_path, list(targets), hidden), hidden.flatten(0, 1).float(), targets.flatten(0, 1)


def test_ridge_is_the_penalised_least_squares(data: tuple[Collected, Tensor, Tensor]) -> None:
    collected, hidden, targets = data
    for layer in range(LAYERS):
        model = ridge(collected, layer)
        # The penalty as rows of their own: an independent solver sees plain least squares over centred data.
        x, y = hidden[:, layer].double().numpy(), targets[:, layer].double().numpy()
        rows = np.vstack([x - x.mean(0), np.eye(SIZE)])
        expected = np.linalg.lstsq(rows, np.vstack([y - y.mean(0), np.zeros((SIZE, HEADS))]), rcond=None)[0]
        np.testing.assert_allclose(model.weight.detach().numpy(), expected.T, atol=1e-5)
        np.testing.assert_allclose(model.bias.detach().numpy(), y.mean(0) - x.mean(0) @ expected, atol=1e-5)


def test_the_mlp_bends_where_the_line_cannot(data: tuple[Collected, Tensor, Tensor]) -> None:
    collected, hidden, targets = data
    settings = MlpSettings(hidden_dim=32, epochs=20, batch=64)
    bent, straight = mlp(collected, 1, settings, "cpu"), ridge(collected, 1)
    errors = [(predict(model, hidden[:, 1]) - targets[:, 1]).square().mean() for model in (bent, straight)]
    assert errors[0] < 0.5 * errors[1]
    again = mlp(collected, 1, settings, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(bent.parameters(), again.parameters(), strict=True))
    other = mlp(collected, 1, MlpSettings(hidden_dim=32, epochs=1, batch=64, seed=1), "cpu")
    assert not torch.equal(bent[0].weight, other[0].weight)


def test_a_trained_layer_comes_back(data: tuple[Collected, Tensor, Tensor], tmp_path: Path) -> None:
    collected, hidden, _ = data
    for model in (ridge(collected, 0), mlp(collected, 0, MlpSettings(8, epochs=1), "cpu")):
        assert load_layer(tmp_path / "layer") is None
        save_layer(model, tmp_path / "layer")
        loaded = load_layer(tmp_path / "layer")
        assert loaded is not None
        assert torch.equal(predict(loaded, hidden[:, 0]), predict(model, hidden[:, 0]))
        (tmp_path / "layer").write_bytes((tmp_path / "layer").read_bytes()[:-9])
        assert load_layer(tmp_path / "layer") is None
        (tmp_path / "layer").unlink()


def test_r_squared_is_numpys() -> None:
    x, y = torch.randn(50, 2, 3), torch.randn(50, 2, 3)
    expected = [[np.corrcoef(x[:, l, h], y[:, l, h])[0, 1] ** 2 for h in range(3)] for l in range(2)]
    np.testing.assert_allclose(r_squared(x, y).numpy(), expected, rtol=1e-5)


def test_thresholds_are_counted() -> None:
    predicted, targets = torch.randn(1000, 2, 2) - 4, torch.randn(1000, 2, 2) - 4
    table = threshold_table(predicted, targets)
    assert [row["threshold"] for row in table][:2] == [table[0]["threshold"], table[0]["threshold"] + 0.5]
    row = table[len(table) // 2]
    ours, theirs = predicted < row["threshold"], targets < row["threshold"]
    assert row["removed"] == pytest.approx(ours.float().mean().item(), abs=1e-4)
    assert row["target_removed"] == pytest.approx(theirs.float().mean().item(), abs=1e-4)
    assert row["agreement"] == pytest.approx((ours == theirs).float().mean().item(), abs=1e-4)
    assert (predicted < threshold_removing(predicted, 0.7)).float().mean().item() == pytest.approx(0.7, abs=0.03)
