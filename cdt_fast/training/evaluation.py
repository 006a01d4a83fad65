"""The evaluation of a run, whatever its task, and the verdict on it: whether it is of any use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.files import write_json
from cdt_fast.training.allocator import disable_malloc_trim
from cdt_fast.training.checkpoint import load_checkpoint, run_identity
from cdt_fast.training.factory import build_constraints, warmup_steps
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings
from cdt_fast.training.task import EvaluatedRun, Task


def evaluate_run(folder: RunFolder, settings: RunSettings, task: Task, progress: bool = True) -> EvaluatedRun:
    """Measure the model that a run kept, and write `evaluation.json`."""
    disable_malloc_trim()
    state = load_checkpoint(folder.checkpoint, run=run_identity(settings))
    data = task.load(settings, progress)
    saved = DescentConstraints.saved_settings(state["constraints"])
    used = saved["reference"]  # what the training took, which knew the loss of a guess
    constraints = build_constraints(settings, saved["layers"], used if isinstance(used, float) else None)
    constraints.load_state_dict(state["constraints"])
    progress_made = {"trained_steps": state["step"], "steps": state["steps"]}
    if state["best"] is not None:
        progress_made |= {"kept_step": state["best"]["step"], "warmup_steps": warmup_steps(settings, len(data.train))}
        progress_made |= _validated(folder, state)
    measured = task.evaluate(folder, settings, data, constraints, progress)
    evaluation = task.evaluation.model_validate({**judged(measured, settings, constraints), **progress_made})
    run = EvaluatedRun(folder, settings, task, evaluation)
    evaluation.success, evaluation.verdict = verdict(run)
    write_json(folder.evaluation, evaluation.model_dump(mode="json"))
    return run


def _validated(folder: RunFolder, state: dict[str, Any]) -> dict[str, float]:
    """What the training came to on validation data, up to the checkpoint; nothing where its start was not validated."""
    logged = [entry for entry in folder.read_metrics() if "validation" in entry and entry["step"] <= state["step"]]
    if not logged or logged[0]["step"] > 0:
        return {}
    untrained, final = (entry["validation"]["loss"][-1] for entry in (logged[0], logged[-1]))
    return {"untrained_loss": untrained, "kept_loss": state["best"]["loss"][-1], "final_loss": final}


def judged(measured: dict[str, Any], settings: RunSettings, constraints: DescentConstraints) -> dict[str, Any]:
    """What a task measured, with what the settings say of the run and the constraints of its losses."""
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
    """Whether a run is a success, and that and where its exits stand in words.

    Of a success the constraints hold, where the run has some, the kept model is a trained one, and its last depth is
    better than the input, every baseline without weights and the plain run, where one is among `others`, runs on the
    same data: by more than chance explains, where the margins of the losses are known. Those of two runs count as
    independent, which on the same samples is cautious.
    """
    reading, values = run.task.reading(run), run.evaluation
    depths, last = reading.depths, reading.depths[-1]
    own = reading.margins or [0.0] * len(depths)
    # What each depth has to beat, and by how much: the same for all, but for the plain run's own value at that depth.
    references = {name: ([value] * len(depths), own) for name, value in reading.references.items()}
    plain = plain_run(run, others)
    if plain is not None:
        other = plain.task.reading(plain)
        margins = [math.hypot(*pair) for pair in zip(own, other.margins or own, strict=True)]
        references[f"plain training ({plain.name or plain.folder.name})"] = other.depths, margins
    digits = _digits_apart(last, [of[-1] for of, _ in references.values()])
    found: dict[str, list[str]] = {"better than": [], "no different from": [], "not better than": []}
    for name, (of, margins) in references.items():
        difference = of[-1] - last
        chance = margins[-1] > 0 and abs(difference) <= margins[-1]
        word = "no different from" if chance else "better than" if difference > 0 else "not better than"
        found[word].append(f"{name} ({of[-1]:.{digits}g})")
    holds, words = _held(values)
    judged = bool(words)
    untrained_kept = values.kept_step == 0
    if untrained_kept:
        words.insert(0, "training gained nothing, and the untrained network was kept")
    success = holds and not untrained_kept and not found["no different from"] and not found["not better than"]
    shown = f"{reading.measure}: {last:.{digits}g}" + (f" ±{own[-1]:.2g} on {reading.samples}" if own[-1] else "")
    compared = [f"{word} {_listed(names)}" for word, names in found.items() if names]
    words.append(f"the last depth ({shown}) is {'; '.join(compared)}")
    text = f"{'Success' if success else 'No success'}: {'; '.join(words)}."
    if len(depths) > 2:
        beaten: dict[str, list[str]] = {}  # the references by the exits that are better
        for name, (of, margins) in references.items():
            exits = [depth for depth in range(1, len(depths) - 1) if of[depth] - depths[depth] > margins[depth]]
            beaten.setdefault(_ranges(exits), []).append(name)
        parts = [
            f"than {'all of these' if len(beaten) == 1 < len(names) else _listed(names)}: {exits}"
            for exits, names in beaten.items()
        ]
        text += f" Exits better {'; '.join(parts)}."
    kept, warmup = values.kept_step, values.warmup_steps
    before, after = values.untrained_loss, values.final_loss if untrained_kept else values.kept_loss
    if before is not None and after is not None and after > before:
        digits = _digits_apart(before, [after])
        text += (
            f" Training made the last depth worse than it was untrained: {before:.{digits}g} -> {after:.{digits}g} on "
            "validation data."
        )
    if not untrained_kept and values.constrained and kept is not None and kept <= warmup < values.trained_steps:
        text += (
            f" The model that was kept is that of step {kept}, before the constraints came on (after step {warmup}): "
            "by its last loss and the price of its violations none after it was better."
        )
    if judged and 0 < values.trained_steps <= warmup:
        text += f" The constraints never came on, which is after step {warmup}: they only judge."
    return success, text


def plain_run(run: EvaluatedRun, others: Sequence[EvaluatedRun]) -> EvaluatedRun | None:
    """Among runs of as many layers the unconstrained one on the last loss alone: of as many parameters and the same
    seed, where there is one. None for a run that is one itself.
    """
    if _is_plain(run):
        return None
    plain = [other for other in others if _is_plain(other) and other.evaluation.layers == run.evaluation.layers]
    return min(
        plain,
        key=lambda other: (
            other.evaluation.parameters != run.evaluation.parameters,
            other.settings.training.seed != run.settings.training.seed,
        ),
        default=None,
    )


def _held(values: Any) -> tuple[bool, list[str]]:
    """Whether the constraints of a run hold, and the words that say so; none where it has no constraints."""
    report = values.report
    if not values.constrained or (report.worst_layer is None and not report.unjudged):
        return True, []
    if report.worst_layer is None:
        return False, ["the constraints never came on"]
    if not values.feasible:
        return False, ["constraints are violated"]
    held = "the bounds hold" if report.caveat else "all constraints hold"
    if report.unjudged:
        held = f"{report.judged} of {report.judged + report.unjudged} constraints are judged, and hold"
    return True, [f"{held}, but {report.caveat}" if report.caveat else held]


def _digits_apart(number: float, others: Sequence[float]) -> int:
    """As many digits, four or more, as tell a number from others that are different."""
    return next(
        digits
        for digits in range(4, 18)
        if all(f"{number:.{digits}g}" != f"{other:.{digits}g}" for other in others if other != number)
    )


def _is_plain(run: EvaluatedRun) -> bool:
    return not run.settings.constrained and run.settings.objective == "last"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]


def _ranges(depths: Sequence[int]) -> str:
    """`1 to 3 and 5`, or `none`."""
    runs = [[depth for _, depth in run] for _, run in groupby(enumerate(depths), lambda pair: pair[1] - pair[0])]
    return _listed([str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]) if runs else "none"
