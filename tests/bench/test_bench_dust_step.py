"""The benchmark runs at toy size, and refuses to time a step that is wrong."""

from __future__ import annotations

import pytest
import torch

from cdt_fast.bench import dust_step
from cdt_fast.models import DUST


def test_measures_at_toy_size() -> None:
    result = dust_step.measure(tokens=40, repeats=1)
    assert result["difference"] < 1e-4
    steps = result["default allocator"]
    assert set(steps) == {"written out, fp32", "cdt_fast, fp32", "cdt_fast, bf16 autocast"}
    assert steps["written out, fp32"]["speed_up"] == 1.0
    assert all(figures["median_seconds"] > 0 for figures in steps.values())


def test_refuses_to_time_a_wrong_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: DUST, noisy: torch.Tensor, clean: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total, per_layer = model.layer_losses(noisy, clean, 1.01 * weights)
        total.backward()
        return per_layer

    monkeypatch.setattr(dust_step, "fused_step", wrong)
    with pytest.raises(AssertionError, match="not timed"):
        dust_step.check_agreement(*dust_step.setting(tokens=40))
