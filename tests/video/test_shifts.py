"""Shifts beyond white noise: what each does to frames, by its own measure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast.video.shifts import SHIFTS, seen


def frames(count: int = 8) -> torch.Tensor:
    return torch.rand(count, 40, 48, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.25


def shifted(name: str, clean: torch.Tensor) -> torch.Tensor:
    return seen(clean, name, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("count", [1, 8])
def test_a_shift_keeps_the_shape_and_is_the_same_for_one_seed(name: str, count: int) -> None:
    clean = frames(count)
    before = clean.clone()
    found = shifted(name, clean)
    assert found.shape == clean.shape
    assert found.dtype == clean.dtype
    assert torch.equal(shifted(name, clean), found)
    assert torch.equal(clean, before)
    assert not torch.equal(found, clean)


def test_each_does_what_it_is_called() -> None:
    clean = frames()
    photons = shifted("Poisson, 30 photons", torch.full((8, 100, 100), 0.5))
    assert photons.var().item() == pytest.approx(0.5 / 30, rel=0.05)
    salted = shifted("salt and pepper, 5 %", clean)
    assert ((salted == 0) | (salted == 1)).float().mean().item() == pytest.approx(0.05, abs=0.01)
    assert (salted == 0).sum().item() == pytest.approx((salted == 1).sum().item(), rel=0.3)
    noise = 20 / 255
    flat = torch.full((8, 40, 48), 0.5)
    assert (shifted("blur and σ 20", flat) - flat).std().item() == pytest.approx(noise, rel=0.05)
    assert shifted("blur and σ 20", clean).var() < clean.var() + noise**2 - 0.5 * clean.var()
    assert 0 < (shifted("JPEG, quality 20", clean) - clean).abs().mean() < 0.2
    lost = shifted("lost frames and σ 20", clean).mean((1, 2))
    assert (lost[[3, 7]].abs() < 0.02).all()
    assert (lost[[0, 1, 2, 4, 5, 6]] > 0.4).all()
    frozen = shifted("frozen frames and σ 20", clean)
    assert torch.equal(frozen[3], frozen[2])
    assert torch.equal(frozen[7], frozen[6])
    assert not torch.equal(frozen[4], frozen[3])
    brighter = (shifted("drift and σ 20", clean) - clean).mean((1, 2)) * 255
    assert brighter[0].item() == pytest.approx(0, abs=2)
    assert brighter[-1].item() == pytest.approx(40, abs=2)


def test_a_number_is_white_noise_of_so_many_levels() -> None:
    clean = torch.full((8, 100, 100), 0.5)
    assert (seen(clean, 30.0, torch.Generator().manual_seed(0)) - clean).std().item() == pytest.approx(
        30 / 255, rel=0.02
    )


def test_shifts_need_clips(call: Callable[..., Any], trained: Any, tmp_path: Path) -> None:
    assert "--shifts needs --clips" in call("evaluate", trained.constrained, "--shifts").line()
