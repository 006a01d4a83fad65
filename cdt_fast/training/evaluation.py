"""The evaluation of a run of any task, and the verdict on it."""

import math
from collections.abc import Sequence
from typing import Any

from cdt_fast.checks import InputError
from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.files import read_json, write_json
from cdt_fast.training.checkpoint import check_data, load_checkpoint, run_identity
from cdt_fast.training.execution import disable_malloc_trim
from cdt_fast.training.optimizer import build_constraints
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings
from cdt_fast.training.task import EvaluatedRun, Task


def evaluate_run(folder: RunFolder, settings: RunSettings, task: Task, data: Any = None) -> EvaluatedRun:
    """Measure the model that a run kept, and write `evaluation.json`; `data`: as `train`."""
    disable_malloc_trim()
    state = load_checkpoint(folder.checkpoint, run=run_identity(settings))
    if folder.kept.exists() and read_json(folder.kept) != state["best"]["step"]:  # an earlier version kept no note
        raise InputError(f"{folder.path}: its model is newer than its checkpoint; resume its training with --resume")
    if data is None:
        data = task.load(settings)
        check_data(state, data.identity, settings.data.source, task.SAMPLES, folder.path)
    data = data.limited(settings.evaluation.limit)
    saved = state["constraints"]["_extra_state"]
    used = saved["reference"]  # maybe the loss of a guess, which only the training knew
    constraints = build_constraints(settings, saved["layers"], used if isinstance(used, float) else None)
    constraints.load_state_dict(state["constraints"])
    best = state["best"]
    progress_made = {"trained_steps": state["step"], "steps": state["steps"], "kept_step": best["step"]}
    # Of instructions some may have been left out, which an earlier version counted.
    warmup_steps = state.get("warmup_steps", settings.warmup_steps(len(data.train)))
    progress_made |= {"warmup_steps": warmup_steps, "kept_loss": best["loss"][-1]}
    progress_made["untrained_loss"] = best.get("untrained_loss")  # an earlier version did not keep it
    measured = task.evaluate(folder, settings, data)
    evaluation = task.Evaluation.model_validate({**judged(measured, settings, constraints), **progress_made})
    run = EvaluatedRun(folder, settings, task, evaluation)
    evaluation.success, evaluation.verdict = verdict(run)
    write_json(folder.in_place().evaluation, evaluation.model_dump(mode="json"))
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
        "limit": settings.evaluation.limit,
        **measured,
        "layer_ratio": found["ratio"],
        "rate": constraints.options.rate or [None] * constraints.layers,
        "feasible": found["feasible"],
        "violation": found["violation"],
        "report": {**found, "text": str(report)},
    }


def verdict(run: EvaluatedRun) -> tuple[bool, str]:
    """Return whether a run is a success, which passes all checks with a trained model, and in a line what it lacks."""
    missed = ["training gained nothing"] * (run.evaluation.kept_step == 0)
    for name, answer in checks(run, [run]).items():
        if answer not in ("yes", ""):
            bounds = "bounds do not hold" if answer == "no" else f"bounds {answer}"
            missed.append(bounds if name == "bounds hold" else f"not {name}")
    return not missed, f"no success: {'; '.join(missed)}" if missed else "success"


def checks(run: EvaluatedRun, runs: Sequence[EvaluatedRun]) -> dict[str, str]:
    """Return what is asked of one of `runs`, on the same data, and the answers: "" where a check does not apply. Chance
    explains what is within the margins of the losses; to take those of two runs as independent is cautious."""
    own, values, plain = run.task.report([run]), run.evaluation, plain_run(run, runs)
    last, margin = own.depths[-1], (own.margins or [0.0])[-1]

    def better(value: float, chance: float) -> str:
        if chance > 0 and abs(value - last) <= chance:
            return "not told apart"
        return "yes" if value > last else "no"

    bounds = ("came on in part" if values.report.unjudged else "yes") if values.feasible else "no"
    if values.report.worst_layer is None:
        bounds = "never came on" if values.report.unjudged else ""
    found = {"bounds hold": bounds if values.constrained else ""}
    found |= {f"better than {name}": better(value, margin) for name, value in own.references.items()}
    other = plain.task.report([plain])
    both = math.hypot(margin, (other.margins or [margin])[-1])
    return {**found, "better than plain training": "" if plain is run else better(other.depths[-1], both)}


def plain_run(run: EvaluatedRun, runs: Sequence[EvaluatedRun]) -> EvaluatedRun:
    """Return which of `runs` to compare a run with: of as many layers, without constraints, on the last loss alone, if
    possible as many parameters and the same seed. It is the run itself if that is plain, or none is."""
    size, seed = run.evaluation.parameters, run.settings.training.seed
    plain = [one for one in runs if not one.settings.constrained and one.settings.objective == "last"]
    plain = [one for one in plain if one.evaluation.layers == run.evaluation.layers]
    plain.sort(key=lambda one: (one is not run, one.evaluation.parameters != size, one.settings.training.seed != seed))
    return plain[0] if plain else run
