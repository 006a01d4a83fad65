"""Leaving the denoiser early: thresholds against all others, the budget, and what `denoise` makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast.errors import InputError
from cdt_fast.files import read_json
from cdt_fast.video.denoising import Denoising
from cdt_fast.video.exits import Exits, calibrated, change, chosen
from tests.video.test_overlap import denoiser, network_of, windows

Call = Callable[..., Any]


def measured(seed: int, windows: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Errors of three depths, and changes that say something of what the next layer gains."""
    generator = torch.Generator().manual_seed(seed)
    gains = torch.randn(windows, 2, generator=generator, dtype=torch.float64)
    changes = -gains + 0.5 * torch.randn(gains.shape, generator=generator, dtype=torch.float64)
    steps = torch.cat([torch.rand(windows, 1, generator=generator, dtype=torch.float64), -0.3 * gains - 0.1], 1)
    return steps.cumsum(1).exp(), changes


def after(exits: Exits, errors: torch.Tensor, changes: torch.Tensor) -> tuple[float, float]:
    """Mean logarithm of the error, and mean layers, window by window."""
    logs, layers = [], []
    for row, moved in zip(errors.log().tolist(), changes.tolist(), strict=True):
        pairs = [(exits.threshold(depth), one) for depth, one in enumerate(moved, 1)]
        above = [depth for depth, (threshold, one) in enumerate(pairs, 1) if threshold is not None and one > threshold]
        depth = above[0] if above else len(row)
        logs.append(row[depth - 1])
        layers.append(depth)
    return sum(logs) / len(logs), sum(layers) / len(layers)


@pytest.mark.parametrize("seed", range(3))
def test_what_exits_are_said_to_gain_is_what_they_gain(seed: int) -> None:
    errors, changes = measured(seed)
    found = calibrated(errors, changes)
    everything = errors[:, -1].log().mean().item()
    for exits in found:
        error, layers = after(exits, errors, changes)
        assert exits.layers == pytest.approx(layers)
        assert exits.gain == pytest.approx((everything - error) * 10 / torch.tensor(10.0).log().item(), abs=1e-6)
    assert min(exits.layers for exits in found) == 1
    assert len(found) > 5


@pytest.mark.parametrize("seed", range(3))
def test_of_one_exit_no_threshold_gains_more(seed: int) -> None:
    errors, changes = measured(seed)
    errors, changes = errors[:, :2], changes[:, :1]
    best = max(calibrated(errors, changes), key=lambda exits: exits.gain)
    tried = [None, *(changes.flatten() - 1e-9).tolist()]
    errors_of_all = [after(Exits(thresholds=[one], layers=0, gain=0), errors, changes)[0] for one in tried]
    assert after(best, errors, changes)[0] == pytest.approx(min(errors_of_all))


def test_a_budget_takes_the_best_that_it_can_pay_and_none_the_fewest_layers_that_lose_nothing() -> None:
    every = [
        Exits(thresholds=[None, None], layers=3.0, gain=0.0),
        Exits(thresholds=[None, 0.2], layers=2.6, gain=0.004),
        Exits(thresholds=[None, 0.1], layers=2.2, gain=-0.003),
        Exits(thresholds=[0.3, 0.1], layers=1.9, gain=-0.2),
        Exits(thresholds=[0.0, 0.0], layers=1.0, gain=-2.0),
    ]
    assert chosen(every, 3, None) == every[2]
    for budget, number in ((3.0, 1), (2.5, 2), (2.0, 3), (1.0, 4)):
        assert chosen(every, 3, budget) == every[number]
    assert chosen([], 3, None) is None
    for budget in (0.9, 3.1, float("nan")):
        with pytest.raises(InputError, match="--budget must be from 1 to 3 layers"):
            chosen(every, 3, budget)
    with pytest.raises(InputError, match="none of the run's exits takes so few"):
        chosen(every[:2], 3, 1.5)
    with pytest.raises(InputError, match="--budget needs a denoiser"):
        chosen([], 3, 2.0)


def test_a_window_is_left_where_a_layer_has_changed_too_much() -> None:
    network, settings = network_of(denoiser()), denoiser()
    noisy, _, _ = windows(0)
    noisy, deviation = noisy[:1], torch.tensor([0.05])
    whole = Denoising(network, settings, 3, grids=2)
    whole.plane(noisy, 0.05 * 255)
    depths = [Denoising(network, settings, depth, grids=2).plane(noisy, 0.05 * 255) for depth in range(4)]
    first = change(1, noisy, depths[1], deviation).item()
    assert first == pytest.approx(1 - (depths[1] - noisy).square().mean().item() / 0.05**2)
    second = change(2, depths[1], depths[2], deviation).item()
    assert second == pytest.approx((depths[2] - depths[1]).square().mean().item() / 0.05**2)
    expected: list[tuple[list[float | None], int]] = [
        ([first - 1e-6, None], 1),
        ([first + 1e-6, second - 1e-9], 2),
        ([None, second + 1e-6], 3),
        ([None, None], 3),
    ]
    for thresholds, depth in expected:
        leaving = Denoising(network, settings, 3, grids=2, exits=Exits(thresholds=thresholds, layers=1, gain=0))
        assert torch.equal(leaving.plane(noisy, 0.05 * 255), depths[depth])
        assert leaving.layers == [depth]


def test_denoise_leaves_early_by_what_the_evaluation_has_calibrated(call: Call, clip: Path, tmp_path: Path) -> None:
    words = ["--size", 16, "--code-size", 64, "--layers", 2, "--steps", 2, "--gammas", "0,30"]
    run = tmp_path / "run"
    assert call("train", "video", clip, "--out", run, "--device", "cpu", *words).status == 0
    evaluation = read_json(run / "evaluation.json")
    assert min(exits["layers"] for exits in evaluation["exits"]) == 1
    told = tmp_path / "told.json"
    least = call("denoise", run, clip, tmp_path / "least.mp4", "--budget", 1, "--json", told)
    assert least.status == 0
    assert read_json(told)["depth"] >= 1
    assert call("denoise", run, clip, tmp_path / "all.mp4").status == 0
    assert "--budget must be from 1 to 2 layers" in call("denoise", run, clip, tmp_path / "x.mp4", "--budget", 3).line()
    both = call("denoise", run, clip, tmp_path / "x.mp4", "--budget", 1, "--depth", 1)
    assert "--depth and --budget exclude each other" in both.line()
    (run / "evaluation.json").unlink()
    assert "--budget needs" in call("denoise", run, clip, tmp_path / "x.mp4", "--budget", 1).line()


def test_a_run_of_the_paper_has_no_exits(call: Call, trained: Any, clip: Path, tmp_path: Path) -> None:
    assert read_json(trained.constrained / "evaluation.json")["exits"] == []
    line = call("denoise", trained.constrained, clip, tmp_path / "out.mp4", "--budget", 1).line()
    assert "--budget needs a denoiser" in line
