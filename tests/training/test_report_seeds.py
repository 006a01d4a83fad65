"""Runs that differ in the seed alone are summed up together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cdt_fast.training.report import seed_table
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.task import EvaluatedRun
from cdt_fast.video.settings import VideoSettings
from tests.runs import task_of


def run(name: str, seed: int, mean: float, feasible: bool, ratios: list[float | None], **settings: Any) -> EvaluatedRun:
    config = VideoSettings()
    config.use_preset("paper-dust")
    config.update("training", {"seed": seed})
    config.update("model", settings)
    evaluation = SimpleNamespace(
        gamma=[0.1, 1.0],
        rmse=[mean, 2 * mean],
        mean_rmse=mean,
        layer_loss=[4.0, mean / 10],
        layer_ratio=ratios,
        feasible=feasible,
        constrained=True,
        tied=False,
    )
    return EvaluatedRun(RunFolder(Path(name)), config, task_of(config), evaluation)


def test_mean_and_range_over_seeds() -> None:
    runs = [
        run("a", 0, 4.0, True, [0.5, 0.7]),
        run("b", 1, 6.0, False, [1.1, None]),
        run("c", 0, 9.0, True, [0.5, 0.6], layers=3),
    ]
    head, row = seed_table(runs)
    assert head[3:5] == ["RMSE, γ 0.1", "RMSE, γ 1"]
    numbers = ["5 (4..6)", "5 (4..6)", "10 (8..12)", "0.5 (0.4..0.6)", "0.9 (0.7..1.1)"]
    assert row == ["constrained, chain, untied", "2", *numbers, "1 of 2"]


def test_no_table_where_no_two_runs_differ_in_the_seed_alone() -> None:
    assert seed_table([run("a", 0, 4.0, True, [0.5]), run("b", 1, 5.0, True, [0.5], layers=3)]) == []
