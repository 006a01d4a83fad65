"""The evaluation of a run, whatever its task: the model it kept, judged by the constraints of its training."""

from __future__ import annotations

import math
from typing import Any

from cdt_fast.constraints.descent import DescentConstraints
from cdt_fast.files import write_json
from cdt_fast.training.allocator import disable_malloc_trim
from cdt_fast.training.checkpoint import load_checkpoint, run_identity
from cdt_fast.training.factory import build_constraints
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings
from cdt_fast.training.task import EvaluatedRun, Task
from cdt_fast.training.verdict import verdict


def evaluate_run(folder: RunFolder, settings: RunSettings, task: Task, progress: bool = True) -> EvaluatedRun:
    """Measure the model that a run kept, and write `evaluation.json`."""
    disable_malloc_trim()
    state = load_checkpoint(folder.checkpoint, run=run_identity(settings))
    data = task.load(settings, progress)
    constraints = build_constraints(settings, data, "cpu", state["constraints"]["layers"])
    constraints.load_state_dict(state["constraints"])
    progress_made = {"trained_steps": state["step"], "steps": state["steps"]}
    if state["best"] is not None:
        progress_made |= {"kept_step": state["best"]["step"], "warmup_steps": constraints.warmup_steps}
    measured = task.evaluate(folder, settings, data, constraints, progress)
    evaluation = task.evaluation.model_validate({**judged(measured, settings, constraints), **progress_made})
    run = EvaluatedRun(folder, settings, task, evaluation)
    evaluation.success, evaluation.verdict = verdict(run)
    write_json(folder.evaluation, evaluation.model_dump(mode="json"))
    return run


def judged(measured: dict[str, Any], settings: RunSettings, constraints: DescentConstraints) -> dict[str, Any]:
    """What a task measured, with what the settings say of the run and the constraints of its losses."""
    report = constraints.report(measured["layer_loss"], agreement=measured.get("depth_agreement"))
    verdict = report.as_dict()  # without numbers that JSON cannot represent
    return {
        "task": settings.task,
        "model": settings.model.model,
        "constrained": settings.constrained,
        "source": settings.data.source,
        **measured,
        "layer_ratio": verdict["ratio"],
        "rate": [None if math.isnan(rate) else rate for rate in constraints.rates.tolist()],
        "feasible": verdict["feasible"],
        "violation": verdict["violation"],
        "report": {**verdict, "text": str(report)},
    }
