"""What a study came to: learning rates by validation, and differences to a baseline, paired by source and seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdt_fast.errors import InputError
from cdt_fast.files import write_text
from cdt_fast.tables import as_markdown, as_text
from cdt_fast.tasks import check_comparable
from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.task import EvaluatedRun, Summary, Table

# Runs of a study by their source, then by the run's name: one a seed, in the order of the seeds.
Cells = Mapping[str, Mapping[str, Sequence[EvaluatedRun]]]


def validation_loss(path: Path) -> float:
    """The validation loss at the last depth of the model that a finished run kept.

    Raises:
        InputError: its checkpoint cannot be read.
    """
    checkpoint = RunFolder(path).checkpoint
    best = load_checkpoint(checkpoint).get("best")
    if not isinstance(best, dict) or not isinstance(best.get("loss"), list):
        raise InputError(f"{checkpoint}: holds no validation losses")
    return best["loss"][-1]


def paired_table(cells: Cells, baseline: str) -> Table:
    """Of each run, by how many percent it differs from the baseline: geometric mean over pairs of the same source and
    seed, with its 95 % interval (Student's t, pairs taken for independent).
    """
    first = next(iter(next(iter(cells.values())).values()))[0]
    columns = _columns(first)
    rows = [[f"% against {baseline}", "pairs", *(column.heading for column in columns), "feasible"]]
    for name in next(iter(cells.values())):
        groups = [runs[name] for runs in cells.values()]
        every = [run for group in groups for run in group]
        row = [name, str(len(every))]
        for column in columns:
            pairs = [
                _log_ratio(column, run, other)
                for runs in cells.values()
                for run, other in zip(runs[name], runs[baseline], strict=True)
                if column not in _LOSSES or run.evaluation.training_gamma == other.evaluation.training_gamma
            ]
            row.append("" if name == baseline else difference([pair for pair in pairs if pair is not None]))
        rows.append([*row, f"{sum(run.evaluation.feasible for run in every)} of {len(every)}"])
    return rows


def exit_table(cells: Cells, baseline: str) -> Table:
    """What every depth reaches, beside networks of that depth: geometric means over sources and seeds.

    Runs that were trained at another noise level than the baseline have no row: what is read is at the training's.
    """
    every = {name: [run for runs in cells.values() for run in runs[name]] for name in next(iter(cells.values()))}
    readings = {name: [run.task.reading(run) for run in runs] for name, runs in every.items()}
    measure, depths = readings[baseline][0].measure, max(len(group[0].depths) for group in readings.values())
    rows = [[f"{measure} after", *(f"layer {depth}" for depth in range(1, depths))]]
    for name, group in readings.items():
        if group[0].measure == measure:
            means = [_geometric_mean(values) for values in zip(*(reading.depths for reading in group), strict=True)]
            words = ["" if mean is None else f"{mean:.4g}" for mean in means[1:]]
            rows.append([name, *words, *[""] * (depths - len(means))])
    return rows


def source_table(cells: Cells) -> Table:
    """The figures behind the differences: means over the seeds, a row a source and run."""
    first = next(iter(next(iter(cells.values())).values()))[0]
    columns = _columns(first)
    rows = [["means over seeds", "learning rate", "seeds", *(column.heading for column in columns), "feasible"]]
    for source, runs in cells.items():
        for name, group in runs.items():
            means = [_mean([value for run in group if (value := column.value(run)) is not None]) for column in columns]
            rates = sorted({_rate(run.settings.training.lr) for run in group})
            feasible = f"{sum(run.evaluation.feasible for run in group)} of {len(group)}"
            rows.append([f"{source}: {name}", " ".join(rates), str(len(group)), *means, feasible])
    return rows


def tables(cells: Cells, baseline: str) -> list[Table]:
    """All tables of a study."""
    return [paired_table(cells, baseline), exit_table(cells, baseline), source_table(cells)]


def write_study(folder: Path, title: str, cells: Cells, baseline: str, command: str) -> Path:
    """Print the tables, write them to `study.md` in `folder`, and return its path.

    Raises:
        InputError: runs of a source were not measured on the same data.
    """
    for runs in cells.values():
        check_comparable([run for group in runs.values() for run in group], of_one_noise=False)
    for table in tables(cells, baseline):
        print("\n" + as_text(table))
    print()
    lines = [f"# {title}", "", f"Made by `{command}`.", "", _READING, ""]
    for table in tables(cells, baseline):
        lines += [as_markdown(table), ""]
    path = folder / "study.md"
    write_text(path, "\n".join(lines))
    return path


_READING = (
    "Held-out data, at the training noise where nothing else is said. ℓ_L: the last depth; exits: the geometric mean "
    "of the losses of depths 1 to L−1 (neither is set beside that of a training at other noise); largest ratio: of a "
    "depth's loss to that of the depth before. The learning rate of a run is the one of the grid with the lowest "
    "validation loss at the last depth with the first seed; the grid is the same for all."
)


def difference(logs: Sequence[float]) -> str:
    """The mean of logarithms of ratios in percent, with its 95 % interval where there are two."""
    if not logs:
        return ""
    mean = sum(logs) / len(logs)
    if len(logs) == 1:
        return f"{_percent(mean):+.1f}"
    deviation = math.sqrt(sum((value - mean) ** 2 for value in logs) / (len(logs) - 1))
    half = t_quantile(0.975, len(logs) - 1) * deviation / math.sqrt(len(logs))
    return f"{_percent(mean):+.1f} [{_percent(mean - half):+.1f}, {_percent(mean + half):+.1f}]"


def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, for a probability above one half, to 1e-6."""
    factor = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    # t = √ν tan θ turns the integral of the density into one of cos^(ν−1) over a bounded interval, by Simpson's rule.
    low, high = 0.0, math.pi / 2
    while high - low > 1e-9:
        middle = (low + high) / 2
        steps = 400
        points = [math.cos(middle * index / steps) ** (degrees - 1) for index in range(steps + 1)]
        integral = middle / steps / 3 * (points[0] + points[-1] + 4 * sum(points[1::2]) + 2 * sum(points[2:-1:2]))
        below = 0.5 + factor * math.sqrt(degrees) * integral
        low, high = (middle, high) if below < probability else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _columns(run: EvaluatedRun) -> list[Summary]:
    ratio = Summary("largest ratio", lambda run: _largest(run.evaluation.layer_ratio))
    return [*_LOSSES, *run.task.summaries([run]), ratio]


# At the noise that a run was trained at.
_LOSSES = (
    Summary("ℓ_L", lambda run: run.evaluation.layer_loss[-1]),
    Summary("exits", lambda run: _geometric_mean(run.evaluation.layer_loss[1:-1])),
)


def _geometric_mean(values: Sequence[float]) -> float | None:
    if not values or min(values) <= 0:
        return None
    return math.exp(sum(map(math.log, values)) / len(values))


def _rate(lr: float | None) -> str:
    return "the model's" if lr is None else f"{lr:g}"


def _largest(ratios: Sequence[Any]) -> float | None:
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def _log_ratio(column: Summary, run: EvaluatedRun, other: EvaluatedRun) -> float | None:
    here, there = column.value(run), column.value(other)
    return math.log(here / there) if here and there and here > 0 and there > 0 else None


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4g}" if values else ""


def _percent(logarithm: float) -> float:
    return 100 * math.expm1(logarithm)
