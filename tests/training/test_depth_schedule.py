"""Baselines that train other depths from step to step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cdt_fast.errors import InputError
from cdt_fast.training.depth_schedule import check_depth_schedule, scheduled_weights
from cdt_fast.training.run_folder import RunFolder
from tests.runs import new_trainer, train


def test_a_random_depth_is_one_of_the_exits_and_any_of_them() -> None:
    drawn = [scheduled_weights("random", 4, step, 4000, seed=3) for step in range(4000)]
    assert all(sorted(weights) == [0, 0, 0, 0, 1] for weights in drawn)
    counts = Counter(weights.index(1) for weights in drawn)
    # Four standard deviations of a binomial count of 4000 draws at a quarter.
    assert set(counts) == {1, 2, 3, 4}
    assert all(abs(count - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5 for count in counts.values())
    assert drawn == [scheduled_weights("random", 4, step, 4000, seed=3) for step in range(4000)]
    assert drawn != [scheduled_weights("random", 4, step, 4000, seed=4) for step in range(4000)]


def test_exits_are_switched_on_from_the_last_to_the_first() -> None:
    weights = [scheduled_weights("gradual", 4, step, 80, seed=0) for step in range(80)]
    starts = [next((step for step in range(80) if weights[step][depth]), None) for depth in range(5)]
    assert starts == [None, 30, 20, 10, 0]
    assert weights[-1] == (0, 1, 1, 1, 1)


@pytest.mark.parametrize("schedule", ["random", "gradual"])
def test_a_training_follows_the_schedule(
    tiny_config: Any, tmp_path: Path, schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(constrained=False, depth_schedule=schedule, steps=8)
    trainer = new_trainer(RunFolder.create(tmp_path / "run", config), config)
    seen = []
    losses = trainer.losses.forward

    def forward(*batch_and_weights: Any) -> Any:
        seen.append(batch_and_weights[-1])
        return losses(*batch_and_weights)

    monkeypatch.setattr(trainer.losses, "forward", forward)
    trainer.run(progress=False)
    assert len(seen) >= 8
    expected = [scheduled_weights(schedule, 2, step, 8, config.training.seed) for step in range(8)]
    assert [weights for weights in seen if isinstance(weights, tuple)] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "and so do constraints: train with --no-constrained$"),
        ({"constrained": False, "objective": "log"}, "and so do an objective: .* without --objective"),
    ],
)
def test_what_else_weighs_the_depths_is_refused(
    tiny_config: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = tiny_config(depth_schedule="random", **changes)
    with pytest.raises(InputError, match=message):
        train(RunFolder(tmp_path), config, progress=False)


def test_several_processes_are_refused(tiny_config: Any) -> None:
    config = tiny_config(depth_schedule="random", constrained=False)
    check_depth_schedule(config, 1)
    with pytest.raises(InputError, match="'random', which trains in one process, got 2"):
        check_depth_schedule(config, 2)
