"""What a run is called a success for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdt_fast.training.evaluation import plain_run, verdict
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.task import EvaluatedRun, Report
from cdt_fast.video.settings import VideoSettings

INPUT = {"the input": 5.6, "DCT": 4.0}
NO_STEPS = {"warmup_steps": 0, "trained_steps": 0}
NOT_VALIDATED = dict.fromkeys(("untrained_loss", "kept_loss", "final_loss"))


def run_of(
    depths: list[float],
    *,
    constrained: bool = True,
    seed: int = 0,
    margins: list[float] | None = None,
    judged: tuple[int, int, str] = (3, 0, ""),
    **values: Any,
) -> EvaluatedRun:
    settings = VideoSettings()
    settings.constraints.constrained, settings.training.seed = constrained, seed
    report = dict(zip(("judged", "unjudged", "caveat"), judged, strict=True))
    measured: dict[str, Any] = {"feasible": True, "parameters": 10, "kept_step": None, **NO_STEPS, **NOT_VALIDATED}
    measured |= {"constrained": constrained, "layers": len(depths) - 1, **values}
    evaluation = SimpleNamespace(report=SimpleNamespace(worst_layer=1 if judged[0] else None, **report), **measured)
    own = Report("", "text", {}, "RMSE at γ 0.15", depths, INPUT, margins, "40 texts")
    task: Any = SimpleNamespace(report=lambda runs: own)
    return EvaluatedRun(RunFolder(Path("mine" if constrained else "plain")), settings, task, evaluation)


def steps(kept: int, warmup: int, trained: int) -> dict[str, int]:
    return {"kept_step": kept, "warmup_steps": warmup, "trained_steps": trained}


def losses(untrained: float, kept: float, final: float) -> dict[str, float]:
    return {"untrained_loss": untrained, "kept_loss": kept, "final_loss": final}


HOLD, MISSED = "Success: LAST; constraints hold: yes", "No success: LAST; constraints hold: no"
WORSE = "Training made the last depth worse than it was untrained: 12.84 -> 13.01 on validation data."
EARLY = (
    "The model that was kept is that of step 20, before the constraints came on (after step 20): by its last loss and "
    "the price of its violations none after it was better."
)
NEVER = "The constraints never came on, which is after step 20: they only judge."
GAINED = "a trained model is kept: no, training gained nothing"
MULTIPLIES = "layer 1 multiplies the loss by 1.42 (its rate allows 0.95)"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"feasible": False}, f"{MISSED}; BETTER"),
        ({**steps(21, 20, 90), **losses(3.1, 3.1, 3.3)}, f"{HOLD}; BETTER"),
        (steps(20, 20, 90), f"{HOLD}; BETTER {EARLY}"),
        ({**steps(90, 20, 90), **losses(12.84, 13.01, 13.01)}, f"{HOLD}; BETTER {WORSE}"),
        ({**steps(0, 20, 90), **losses(12.84, 12.84, 13.01)}, f"No s{HOLD[1:]}; {GAINED}; BETTER {WORSE}"),
        (steps(20, 20, 20), f"{HOLD}; BETTER {NEVER}"),
        ({"feasible": False, "judged": (0, 0, "")}, "Success: LAST; BETTER"),
        ({"feasible": False, "judged": (0, 1, "")}, f"{MISSED}, they never came on; BETTER"),
        ({"judged": (2, 1, "")}, f"{HOLD}, the 2 of 3 that are judged; BETTER"),
        ({"judged": (3, 0, MULTIPLIES)}, f"{HOLD}, but {MULTIPLIES}; BETTER"),
    ],
)
def test_a_verdict_is_about_constraints(options: dict[str, Any], text: str) -> None:
    success, found = verdict(run_of([9.0, 3.0], **options))
    expected = text.replace("LAST", "RMSE at γ 0.15 at the last depth is 3")
    assert found == expected.replace("BETTER", "better than the input (5.6): yes; better than DCT (4): yes.")
    assert success == text.startswith("Success")


@pytest.mark.parametrize(
    ("last", "margin", "plain", "success", "text"),
    [
        (44, None, None, False, "is 44; constraints hold: yes; better than the input (5.6): no; better than DCT (4): "),
        (5, 0.5, None, False, "is 5 ±0.5 on 40 texts; constraints hold: yes; better than the input (5.6): yes; better"),
        (3.99, 0.02, None, False, "better than DCT (4): no difference beyond chance."),
        (3.99999, None, None, True, "is 3.99999; constraints hold: yes; better than the input (5.6): yes"),
        # By more than the margins of both.
        (3, None, 2.9, False, "better than plain training (plain) (2.9): no."),
        (2.8, None, 2.9, True, "better than plain training (plain) (2.9): yes."),
        (2.51, 0.3, 3, False, "better than plain training (plain) (3): no difference beyond chance."),
        (2.49, 0.3, 3, True, "better than plain training (plain) (3): yes."),
    ],
)
def test_a_verdict_is_about_the_input_the_baselines_and_a_plain_run(
    last: float, margin: float | None, plain: float | None, success: bool, text: str
) -> None:
    others = [run_of([9.0, plain], constrained=False, margins=[0.0, 0.4] if margin else None)] if plain else []
    found = verdict(run_of([9.0, last], margins=[0.0, margin] if margin else None), others)
    assert found[0] == success
    assert text in found[1]
    assert not plain or "plain training" not in verdict(others[0], [run_of([1.0, 1.0])])[1]


def test_the_plain_run_is_of_the_same_size_and_seed() -> None:
    tied = run_of([1.0, 1.0], constrained=False, parameters=3)
    same, other = (run_of([1.0, 1.0], constrained=False, seed=seed) for seed in (1, 0))
    deeper = run_of([1.0, 1.0, 1.0], constrained=False)
    assert plain_run(run_of([1.0, 1.0], seed=1), [tied, deeper, other, same]) is same
    assert plain_run(run_of([1.0, 1.0], seed=7), [tied, deeper]) is tied
    assert plain_run(run_of([1.0, 1.0]), [deeper, run_of([1.0, 1.0])]) is None
