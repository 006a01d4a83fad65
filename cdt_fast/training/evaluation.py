"""The evaluation of a run of any task, and the verdict on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.files import write_json
from cdt_fast.training.checkpoint import load_checkpoint, run_identity
from cdt_fast.training.execution import disable_malloc_trim
from cdt_fast.training.optimizer import build_constraints
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings
from cdt_fast.training.task import EvaluatedRun, Task


def evaluate_run(folder: RunFolder, settings: RunSettings, task: Task, data: Any = None) -> EvaluatedRun:
    """Measure the model that a run kept, and write `evaluation.json`; `data`: as `train`."""
    disable_malloc_trim()
    state = load_checkpoint(folder.checkpoint, run=run_identity(settings))
    data = task.load(settings) if data is None else data
    saved = DescentConstraints.saved_settings(state["constraints"])
    used = saved["reference"]  # at most the loss of a guess, which only the training knew
    constraints = build_constraints(settings, saved["layers"], used if isinstance(used, float) else None)
    constraints.load_state_dict(state["constraints"])
    progress_made = {"trained_steps": state["step"], "steps": state["steps"]}
    if state["best"] is not None:
        progress_made |= {"kept_step": state["best"]["step"], "warmup_steps": settings.warmup_steps(len(data.train))}
        logged = [entry for entry in folder.read_metrics() if "validation" in entry and entry["step"] <= state["step"]]
        if logged and logged[0]["step"] == 0:
            untrained, final = (entry["validation"]["loss"][-1] for entry in (logged[0], logged[-1]))
            kept = state["best"]["loss"][-1]
            progress_made |= {"untrained_loss": untrained, "kept_loss": kept, "final_loss": final}
    measured = task.evaluate(folder, settings, data)
    evaluation = task.Evaluation.model_validate({**judged(measured, settings, constraints), **progress_made})
    run = EvaluatedRun(folder, settings, task, evaluation)
    evaluation.success, evaluation.verdict = verdict(run)
    write_json(folder.evaluation, evaluation.model_dump(mode="json"))
    return run


def judged(measured: dict[str, Any], settings: RunSettings, constraints: DescentConstraints) -> dict[str, Any]:
    """Return the entries that a task measured, with those that follow from the settings and the constraints."""
    report = constraints.report(measured["layer_loss"])
    found = report.as_dict()  # without numbers that JSON cannot represent
    return {
        "task": settings.task,
        "model": settings.model.model,
        "constrained": settings.constrained,
        "source": settings.data.source,
        **measured,
        "layer_ratio": found["ratio"],
        "rate": constraints.options.rate or [None] * constraints.layers,
        "feasible": found["feasible"],
        "violation": found["violation"],
        "report": {**found, "judged": report.judged, "text": str(report)},
    }


def verdict(run: EvaluatedRun, others: Sequence[EvaluatedRun] = ()) -> tuple[bool, str]:
    """Return whether a run is a success, and its checks in words.

    A success satisfies its constraints, if it has some, has kept a trained model, and its last depth is better than the
    input, every baseline without weights and the plain run, if one is among `others`, runs on the same data: by more
    than chance explains, where the margins of the losses are known. Those of two runs count as independent, which on
    the same samples is cautious.
    """
    own, values = run.task.report([run]), run.evaluation
    last, margin = own.depths[-1], (own.margins or [0.0])[-1]
    references = {name: (value, margin) for name, value in own.references.items()}
    plain = plain_run(run, others)
    if plain is not None:
        other = plain.task.report([plain])
        both = math.hypot(margin, (other.margins or [margin])[-1])
        references[f"plain training ({plain.name or plain.folder.name})"] = other.depths[-1], both
    digits = _digits_apart(last, [value for value, _ in references.values()])
    checks = _bounds_check(values)
    if values.kept_step == 0:
        checks["a trained model is kept"] = "no, training gained nothing"
    for name, (value, chance) in references.items():
        answer = "yes" if value > last else "no"
        if chance > 0 and abs(value - last) <= chance:
            answer = "no difference beyond chance"
        checks[f"better than {name} ({value:.{digits}g})"] = answer
    success = all(answer.startswith("yes") for answer in checks.values())
    shown = f"{last:.{digits}g}" + (f" ±{margin:.2g} on {own.samples}" if margin else "")
    words = [f"{own.measure} at the last depth is {shown}", *(f"{name}: {said}" for name, said in checks.items())]
    return success, " ".join([f"{'Success' if success else 'No success'}: {'; '.join(words)}.", *_remarks(values)])


def _bounds_check(values: Any) -> dict[str, str]:
    """Return whether the constraints of a run hold, as a check; empty if it has none."""
    report = values.report
    if not values.constrained or (report.worst_layer is None and not report.unjudged):
        return {}
    if report.worst_layer is None:
        return {"constraints hold": "no, they never came on"}
    if not values.feasible:
        return {"constraints hold": "no"}
    some = f", the {report.judged} of {report.judged + report.unjudged} that are judged" if report.unjudged else ""
    return {"constraints hold": f"yes{some}" + (f", but {report.caveat}" if report.caveat else "")}


def _remarks(values: Any) -> list[str]:
    remarks = []
    kept, warmup = values.kept_step, values.warmup_steps
    before, after = values.untrained_loss, values.final_loss if kept == 0 else values.kept_loss
    if before is not None and after is not None and after > before:
        digits = _digits_apart(before, [after])
        change = f"{before:.{digits}g} -> {after:.{digits}g}"
        remarks.append(f"Training made the last depth worse than it was untrained: {change} on validation data.")
    if kept and values.constrained and kept <= warmup < values.trained_steps:
        remarks.append(
            f"The model that was kept is that of step {kept}, before the constraints came on (after step {warmup}): "
            "by its last loss and the price of its violations none after it was better."
        )
    if _bounds_check(values) and 0 < values.trained_steps <= warmup:
        remarks.append(f"The constraints never came on, which is after step {warmup}: they only judge.")
    return remarks


def plain_run(run: EvaluatedRun, others: Sequence[EvaluatedRun]) -> EvaluatedRun | None:
    """Return the run without constraints and on the last loss alone to compare with, among runs of as many layers.

    One of as many parameters and the same seed comes first. None if there is none, or the run is one itself.
    """
    if _is_plain(run):
        return None
    own = run.evaluation
    plain = [other for other in others if _is_plain(other) and other.evaluation.layers == own.layers]

    def distance(other: EvaluatedRun) -> tuple[bool, bool]:
        same_seed = other.settings.training.seed == run.settings.training.seed
        return other.evaluation.parameters != own.parameters, not same_seed

    return min(plain, key=distance, default=None)


def _is_plain(run: EvaluatedRun) -> bool:
    return not run.settings.constrained and run.settings.objective == "last"


def _digits_apart(number: float, others: Sequence[float]) -> int:
    """Return as many digits, four or more, as tell a number from others that are different."""
    return next(
        digits
        for digits in range(4, 18)
        if all(f"{number:.{digits}g}" != f"{other:.{digits}g}" for other in others if other != number)
    )
