"""What a study came to: differences to a baseline, paired by source and seed, and what every depth reaches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from cdt_fast.training.report import LARGEST_RATIO, LAST_LOSS
from cdt_fast.training.task import EvaluatedRun, Summary, Table

# Runs of a study by their source, then by the run's name: one a seed, in the order of the seeds.
Cells = Mapping[str, Mapping[str, Sequence[EvaluatedRun]]]


class Difference(NamedTuple):
    """By how many percent a run differs from the baseline: the geometric mean over pairs, and its 95 % interval
    (Student's t, pairs taken for independent), which a single pair does not have.
    """

    mean: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, logs: Sequence[float]) -> Difference | None:
        """That of logarithms of ratios; None where there are none."""
        if not logs:
            return None
        mean = fmean(logs)
        half = t_quantile(0.975, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None
        bounds = [mean] if half is None else [mean, mean - half, mean + half]
        return cls(*(100 * math.expm1(bound) for bound in bounds))

    def __str__(self) -> str:
        return f"{self.mean:+.1f}" + ("" if self.low is None else f" [{self.low:+.1f}, {self.high:+.1f}]")


def differences(cells: Cells, baseline: str) -> dict[str, dict[str, Difference | None]]:
    """Of each column, by its heading, what each run but the baseline differs by, paired by source and seed."""
    found: dict[str, dict[str, Difference | None]] = {}
    for column in _columns(cells):
        found[column.heading] = {}
        for name in _names(cells):
            pairs = [pair for runs in cells.values() for pair in zip(runs[name], runs[baseline], strict=True)]
            if column in _LOSSES:
                pairs = [pair for pair in pairs if len({run.evaluation.training_gamma for run in pair}) == 1]
            values = [[column.value(run) or 0.0 for run in pair] for pair in pairs]
            logs = [math.log(here / there) for here, there in values if here > 0 and there > 0]
            if name != baseline:
                found[column.heading][name] = Difference.of(logs)
    return found


def paired_table(cells: Cells, baseline: str) -> Table:
    """The differences to the baseline, and how many runs of each are feasible."""
    columns = differences(cells, baseline)
    rows = [[f"% against {baseline}", "pairs", *columns, "feasible"]]
    for name in _names(cells):
        every = [run for runs in cells.values() for run in runs[name]]
        words = [str(values.get(name) or "") for values in columns.values()]
        rows.append([name, str(len(every)), *words, _feasible(every)])
    return rows


def exits(cells: Cells, baseline: str) -> tuple[str, dict[str, list[float | None]]]:
    """What was measured, and what every depth from 1 on of every run reaches: geometric means over sources and seeds.

    None where one is not positive. Runs that were trained at another noise level than the baseline are left out: what
    is read is at the training's.
    """
    every = {name: [run for runs in cells.values() for run in runs[name]] for name in _names(cells)}
    readings = {name: [run.task.reading(run) for run in runs] for name, runs in every.items()}
    measure = readings[baseline][0].measure
    return measure, {
        name: [_geometric_mean(values) for values in zip(*(reading.depths[1:] for reading in group), strict=True)]
        for name, group in readings.items()
        if group[0].measure == measure
    }


def exit_table(cells: Cells, baseline: str) -> Table:
    """What every depth reaches."""
    measure, means = exits(cells, baseline)
    layers = max(map(len, means.values()))
    rows = [[f"{measure} after", *(f"layer {depth}" for depth in range(1, layers + 1))]]
    for name, values in means.items():
        words = ["" if value is None else f"{value:.4g}" for value in values]
        rows.append([name, *words, *[""] * (layers - len(values))])
    return rows


def source_table(cells: Cells) -> Table:
    """The figures behind the differences: means over the seeds, a row a source and run."""
    columns = _columns(cells)
    rows = [["means over seeds", "learning rate", "seeds", *(column.heading for column in columns), "feasible"]]
    for source, runs in cells.items():
        for name, group in runs.items():
            values = [[value for run in group if (value := column.value(run)) is not None] for column in columns]
            means = [f"{fmean(of_column):.4g}" if of_column else "" for of_column in values]
            given = {run.settings.training.lr for run in group}
            rates = sorted("the model's" if lr is None else f"{lr:g}" for lr in given)
            rows.append([f"{source}: {name}", " ".join(rates), str(len(group)), *means, _feasible(group)])
    return rows


def tables(cells: Cells, baseline: str) -> list[Table]:
    """All tables of a study."""
    return [paired_table(cells, baseline), exit_table(cells, baseline), source_table(cells)]


def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, for a probability above one half, to 1e-6."""
    factor = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    # t = √ν tan θ turns the integral of the density into one of cos^(ν−1) over a bounded interval, by Simpson's rule.
    low, high, steps = 0.0, math.pi / 2, 400
    while high - low > 1e-9:
        middle = (low + high) / 2
        points = [math.cos(middle * index / steps) ** (degrees - 1) for index in range(steps + 1)]
        integral = middle / steps / 3 * (points[0] + points[-1] + 4 * sum(points[1::2]) + 2 * sum(points[2:-1:2]))
        low, high = (middle, high) if 0.5 + factor * integral < probability else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


# At the noise that a run was trained at.
_LOSSES = (LAST_LOSS, Summary("exits", lambda run: _geometric_mean(run.evaluation.layer_loss[1:-1])))


def _names(cells: Cells) -> list[str]:
    return list(next(iter(cells.values())))


def _columns(cells: Cells) -> list[Summary]:
    run = next(iter(next(iter(cells.values())).values()))[0]
    return [*_LOSSES, *run.task.summaries([run]), LARGEST_RATIO]


def _feasible(runs: Sequence[EvaluatedRun]) -> str:
    return f"{sum(run.evaluation.feasible for run in runs)} of {len(runs)}"


def _geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(fmean(map(math.log, values))) if values and min(values) > 0 else None
