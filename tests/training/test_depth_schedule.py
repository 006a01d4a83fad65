"""Baselines that train other depths from step to step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cdt_fast.constraints.objective import scaled_coefficients
from cdt_fast.errors import InputError
from cdt_fast.training.factory import check_depth_schedule, scheduled_weights
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import TrainingSettings
from tests.runs import new_trainer, train


def weights_of(schedule: Any, layers: int, steps: int, coefficients: Any = None, **settings: Any) -> list[Any]:
    training = TrainingSettings(depth_schedule=schedule, **settings)
    return [scheduled_weights(training, layers, step, steps, coefficients) for step in range(steps)]


def test_a_random_depth_is_one_of_the_exits_and_any_of_them() -> None:
    drawn = weights_of("random", 4, 4000, seed=3)
    assert all(sorted(weights) == [0, 0, 0, 0, 1] for weights in drawn)
    counts = Counter(weights.index(1) for weights in drawn)
    # Four standard deviations of a binomial count of 4000 draws at a quarter.
    assert set(counts) == {1, 2, 3, 4}
    assert all(abs(count - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5 for count in counts.values())
    assert drawn == weights_of("random", 4, 4000, seed=3)
    assert drawn != weights_of("random", 4, 4000, seed=4)


def test_exits_are_switched_on_from_the_last_to_the_first() -> None:
    weights = weights_of("gradual", 4, 80)
    starts = [next((step for step in range(80) if weights[step][depth]), None) for depth in range(5)]
    assert starts == [None, 30, 20, 10, 0]
    assert weights[-1] == (0, 1, 1, 1, 1)


def test_the_last_exit_and_others_in_turn() -> None:
    weights = weights_of("rotational", 5, 80, depth_rotation=3)[:6]
    assert [[depth for depth in range(5) if one[depth]] for one in weights] == [[3], [2], [1, 4]] * 2
    assert all(one[5] == 1 for one in weights)


@pytest.mark.parametrize("schedule", ["gradual", "rotational"])
def test_the_coefficients_of_the_depths_that_are_on_add_up_to_one(schedule: Any) -> None:
    coefficients = scaled_coefficients("layerskip", range(5))
    plain, scaled = (weights_of(schedule, 4, 80, given, depth_rotation=2) for given in (None, coefficients))
    for mask, weights in zip(plain, scaled, strict=True):
        products = [on * c for on, c in zip(mask, coefficients, strict=True)]
        assert weights == pytest.approx([product / sum(products) for product in products])


def test_scales_are_those_of_torchtune_and_of_layerskips_paper() -> None:
    """Each normalized; torchtune counts layers from 0, and takes their number plus one."""
    depths = [0, 1, 2, 4, 8]
    expected = {
        "uniform": [1, 1, 1, 1],
        "linear": [1, 2, 4, 8],
        "sum": [1, 3, 10, 36],
        "sqrt": [1, 2**0.5, 2, 8**0.5],
        "inverse": [1, 1 / 2, 1 / 4, 1 / 8],
        "inverse-sqrt": [1, 2**-0.5, 1 / 2, 8**-0.5],
        "layerskip": [0, 1, 0 + 1 + 2 + 3, sum(range(7)) + 7],  # e(l) of layer l = depth - 1, and of the last one
    }
    for scale, values in expected.items():
        for factor in (1.0, 0.25):
            weighed = [0.0, *(factor * value for value in values[:-1]), values[-1]]
            found = scaled_coefficients(scale, depths, factor)  # pyright: ignore[reportArgumentType]
            assert found == pytest.approx([value / sum(weighed) for value in weighed]), scale
    assert scaled_coefficients("linear", [0, 1, 3]) == [0.0, 0.25, 0.75]


@pytest.mark.parametrize("schedule", ["random", "gradual", "rotational"])
def test_a_training_follows_the_schedule(
    tiny_config: Any, tmp_path: Path, schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotation = 2 if schedule == "rotational" else None
    config = tiny_config(constrained=False, depth_schedule=schedule, steps=8, depth_rotation=rotation)
    trainer = new_trainer(RunFolder.create(tmp_path / "run", config), config)
    seen = []
    losses = trainer.losses.forward

    def forward(*batch_and_weights: Any) -> Any:
        seen.append(batch_and_weights[-1])
        return losses(*batch_and_weights)

    monkeypatch.setattr(trainer.losses, "forward", forward)
    trainer.run(progress=False)
    assert len(seen) >= 8
    expected = [scheduled_weights(config.training, 2, step, 8) for step in range(8)]
    assert [weights for weights in seen if isinstance(weights, tuple)] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "as do constraints and an objective: train with --no-constrained"),
        ({"constrained": False, "objective": "log"}, "and without --objective"),
        ({"constrained": False, "objective": "depths"}, "and without --objective"),
        ({"constrained": False, "depth_rotation": 2}, "'rotational' alone needs"),
        ({"constrained": False, "exit_scale": 0.5}, "a factor of a scale, such as --coefficients linear"),
        ({"depth_schedule": None, "agreement": {1: 0.9}}, "agreement is a bound for language models"),
    ],
)
def test_what_else_weighs_the_depths_is_refused(
    tiny_config: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = tiny_config(**{"depth_schedule": "random", **changes})
    with pytest.raises(InputError, match=message):
        train(RunFolder(tmp_path), config, progress=False)


def test_several_processes_are_refused(tiny_config: Any) -> None:
    config = tiny_config(depth_schedule="random", constrained=False)
    check_depth_schedule(config, 1)
    with pytest.raises(InputError, match="'random', which trains in one process, got 2"):
        check_depth_schedule(config, 2)
