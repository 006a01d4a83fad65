"""What a run is called a success for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdt_fast.training.evaluation import plain_run, verdict
from cdt_fast.training.report import remarks, verdict_table
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.task import EvaluatedRun, Report
from cdt_fast.video.settings import VideoSettings

INPUT = {"the input": 5.6, "DCT": 4.0}
VALUES: dict[str, Any] = {"feasible": True, "parameters": 10, "kind": "dust", "kept_step": 90, "warmup_steps": 20}
VALUES |= {"untrained_loss": 12.84, "kept_loss": 12.0, "trained_steps": 90, "steps": 90, "finished": True}


def run_of(
    depths: list[float],
    *,
    constrained: bool = True,
    seed: int = 0,
    margins: list[float] | None = None,
    judged: tuple[int | None, int] = (1, 0),
    **values: Any,
) -> EvaluatedRun:
    settings = VideoSettings()
    settings.constraints.constrained, settings.training.seed = constrained, seed
    report = SimpleNamespace(worst_layer=judged[0], unjudged=judged[1])
    values = {**VALUES, "constrained": constrained, "layers": len(depths) - 1, "report": report, **values}
    own = Report("", {}, "RMSE at γ 0.15", depths, INPUT, margins)
    task: Any = SimpleNamespace(report=lambda runs: own)
    return EvaluatedRun(RunFolder(Path("mine" if constrained else "plain")), settings, task, SimpleNamespace(**values))


@pytest.mark.parametrize(
    ("options", "bounds", "text"),
    [
        ({}, "yes", "success"),
        ({"feasible": False}, "no", "no success: bounds do not hold"),
        ({"feasible": False, "judged": (None, 0)}, "", "success"),  # it has none
        ({"feasible": False, "judged": (None, 1)}, "never came on", "no success: bounds never came on"),
        ({"judged": (1, 2)}, "came on in part", "no success: bounds came on in part"),
        ({"feasible": False, "constrained": False}, "", "success"),
        ({"kept_step": 0}, "yes", "no success: training gained nothing"),
    ],
)
def test_a_verdict_is_about_bounds_and_a_trained_model(options: dict[str, Any], bounds: str, text: str) -> None:
    run = run_of([9.0, 3.0], **options)
    assert verdict(run) == (text == "success", text)
    assert verdict_table([run]) == [
        ["", "RMSE at γ 0.15", "bounds hold", "better than the input", "than DCT", "than plain training"],
        ["the input", "5.6", "", "", "", ""],
        ["DCT", "4", "", "", "", ""],
        [run.label, "3", bounds, "yes", "yes", ""],
    ]


CHANCE = "not told apart"


@pytest.mark.parametrize(
    ("last", "margin", "plain", "answers", "text"),
    [
        (44, None, None, ["no", "no", ""], "no success: not better than the input; not better than DCT"),
        (5, 0.5, None, ["yes", "no", ""], "no success: not better than DCT"),
        (3.99, 0.02, None, ["yes", CHANCE, ""], "no success: not better than DCT"),
        (3.99999, None, None, ["yes", "yes", ""], "success"),
        (4, None, None, ["yes", "no", ""], "no success: not better than DCT"),
        # By more than the margins of both. The words are of the run alone.
        (3, None, 2.9, ["yes", "yes", "no"], "success"),
        (2.8, None, 2.9, ["yes", "yes", "yes"], "success"),
        (2.51, 0.3, 3, ["yes", "yes", CHANCE], "success"),
        (2.49, 0.3, 3, ["yes", "yes", "yes"], "success"),
    ],
)
def test_a_verdict_is_about_the_input_the_baselines_and_a_plain_run(
    last: float, margin: float | None, plain: float | None, answers: list[str], text: str
) -> None:
    others = [run_of([9.0, plain], constrained=False, margins=[0.0, 0.4] if margin else None)] if plain else []
    run = run_of([9.0, last], margins=[0.0, margin] if margin else None)
    assert verdict(run)[1] == text
    own, *rows = verdict_table([run, *others])[1 + len(INPUT) :]
    assert own[3:] == answers
    assert [row[2::3] for row in rows] == [["", ""]] * len(others)  # neither bounds nor a plain run


def test_the_plain_run_is_of_the_same_size_and_seed() -> None:
    tied = run_of([1.0, 1.0], constrained=False, parameters=3)
    same, other = (run_of([1.0, 1.0], constrained=False, seed=seed) for seed in (1, 0))
    deeper = run_of([1.0, 1.0, 1.0], constrained=False)
    alone = run_of([1.0, 1.0])
    assert plain_run(run_of([1.0, 1.0], seed=1), [tied, deeper, other, same]) is same
    assert plain_run(run_of([1.0, 1.0], seed=7), [tied, deeper]) is tied
    assert plain_run(alone, [deeper, run_of([1.0, 1.0]), alone]) is alone
    assert plain_run(other, [same, other]) is other


@pytest.mark.parametrize(
    ("options", "remark"),
    [
        ({}, None),
        ({"untrained_loss": None}, None),
        ({"kept_step": 0, "kept_loss": 12.84}, "training gained nothing: the model that was kept is the untrained one"),
        (
            {"kept_loss": 13.01},
            "training made the last depth worse than it was untrained: 12.84 -> 13.01 on validation data",
        ),
        ({"kept_step": 21}, None),
        (
            {"kept_step": 20},
            "the model that was kept is of step 20, before the constraints come on (after step 20)",
        ),
        ({"kept_step": 20, "constrained": False}, None),
        ({"steps": 120, "finished": False}, "the training is not finished, this is step 90 of 120"),
    ],
)
def test_remarks_are_a_line_each(options: dict[str, Any], remark: str | None) -> None:
    run = run_of([9.0, 3.0], **options)
    assert remarks([run]) == ([] if remark is None else [f"{run.label}: {remark}"])
