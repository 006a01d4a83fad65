"""What `cdt-fast reproduce` says before an experiment starts, and the table that it ends with."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from cdt_fast import page
from cdt_fast.checks import InputError
from cdt_fast.experiments import Experiment, PlannedRun
from cdt_fast.progress import progress_bar
from cdt_fast.tasks import open_evaluated, task_of
from cdt_fast.training.checkpoint import saved_step
from cdt_fast.training.execution import disable_malloc_trim
from cdt_fast.training.loop import Trainer
from cdt_fast.training.report import COLORS, add_legend, as_png, axes_of
from cdt_fast.training.results import t_quantile
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.task import Table

_TIMED_STEPS = 3
_MARKS = "o^sDv"  # of noise levels, as colors are of runs


def forecast(experiment: Experiment, planned: Sequence[PlannedRun]) -> tuple[float, Any]:
    """Return how many minutes the runs will take, from a few steps and a validation of each kind of network, and the
    data of all; InputError: they are not those of the experiment, or a run cannot be trained on them."""
    disable_malloc_trim()  # as in the trainings
    settings = planned[0].settings
    data = task_of(settings).load(settings)
    for name, size in experiment.sizes.items():
        if data.sizes[name] != size:
            found = f"holds {data.sizes[name]:,} {name}, not the {size:,} of {experiment.source}"
            raise InputError(f"{settings.data.source}: {found}")
    seconds, known = 0.0, dict[str, tuple[int, float, float, float]]()
    for run in progress_bar(planned, desc="forecast", unit="run"):
        chosen, length = run.settings, run.settings.training.model_copy(update={"seed": 0})
        kind = repr((chosen.model, chosen.constrained, chosen.objective, length))  # what else they choose takes no time
        if kind not in known:
            known[kind] = _times(run, data.limited(settings.evaluation.limit))
        steps, step, validation, evaluation = known[kind]
        left = steps - saved_step(RunFolder(run.path).checkpoint)
        validations = left / run.settings.validation_interval(len(data.validation))
        seconds += left * step + validations * validation + evaluation
    return seconds / 60, data


def _times(run: PlannedRun, data: Any) -> tuple[int, float, float, float]:
    """Return the steps of a training, and the seconds of a step, a validation and the evaluation."""
    settings = run.settings
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(RunFolder(folder), settings, task_of(settings), data)
        trainer.step = trainer.warmup_steps  # until then inner depths may have no gradient
        workload, autocast, ends = trainer.workload, trainer.execution.autocast, []
        validation = (lambda: workload.validation_losses(autocast), lambda: workload.validation_error(autocast))
        for work in (*[trainer._train_step] * (1 + _TIMED_STEPS), *validation):
            work()
            trainer.step += 1
            ends.append(time.perf_counter())
    *steps, level, error = (end - start for start, end in itertools.pairwise(ends))
    evaluation = level * (len(settings.evaluation.gammas) + 1) * len(data.test) / len(data.validation)
    return workload.steps, sum(steps) / _TIMED_STEPS, level + error, evaluation


def results_table(experiment: Experiment, planned: Sequence[PlannedRun]) -> Table:
    """Return the headline of every run, cell by cell: the mean over its seeds, with half of its 95 % interval, and in
    how many of them the constraints hold on test data; beside it the paper's figure."""
    first = open_evaluated(planned[0].path).evaluation
    rows = [[first.HEADLINE, "layers", "γ", "the paper", "here", "seeds", "feasible", "every layer descends"]]
    for cell in experiment.cells:
        for name in experiment.runs:
            found = [open_evaluated(run.path).evaluation for run in planned if (run.cell, run.run) == (cell, name)]
            values = [evaluation.headline for evaluation in found]
            shown = f"{statistics.fmean(values):.3f}"
            if len(values) > 1:
                margin = t_quantile(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
                shown += f" ±{margin:.3f}"
            held = sum(one.feasible and not one.report.unjudged for one in found)
            bounds = f"{held} of {len(found)}" * found[0].constrained
            descends = sum(all(ratio is not None and ratio < 1 for ratio in one.layer_ratio) for one in found)
            paper = f"{cell.paper[name]:.3f}" if name in cell.paper else ""
            shape = str(found[0].layers), f"{found[0].training_gamma:g}"
            rows.append([name, *shape, paper, shown, str(len(found)), bounds, f"{descends} of {len(found)}"])
    return rows


def picture(planned: Sequence[PlannedRun]) -> list[str]:
    """Return a picture of the headline of every run over its number of layers, where that differs."""
    measured = [(run.run, open_evaluated(run.path).evaluation) for run in planned]
    layers = sorted({values.layers for _, values in measured})
    if len(layers) == 1 or importlib.util.find_spec("matplotlib") is None:
        return []
    figure, (axis,) = axes_of()
    lines: dict[tuple[str, float], dict[int, list[float]]] = {}
    for run, values in measured:
        line = lines.setdefault((run, values.training_gamma), {})
        line.setdefault(values.layers, []).append(values.headline)
    runs, gammas = (list(dict.fromkeys(parts)) for parts in zip(*lines, strict=True))
    for (run, gamma), line in lines.items():
        means = [statistics.fmean(line[count]) for count in sorted(line)]
        color, mark = COLORS[runs.index(run) % len(COLORS)], _MARKS[gammas.index(gamma) % len(_MARKS)]
        axis.plot(sorted(line), means, f"{mark}-", color=color, label=f"{run}, γ {gamma:g}")
    axis.set(xlabel="layers", ylabel=measured[0][1].HEADLINE, xticks=layers)
    add_legend(axis)
    return [page.picture(as_png(figure), f"{measured[0][1].HEADLINE} over the number of layers, means over the seeds")]
