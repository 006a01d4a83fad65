"""What a study came to: differences to a baseline, paired by source and seed, and what every depth reaches.

The report has the tables in Markdown, and with pictures as one page of HTML that needs no other file.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from string import Template
from typing import Any, NamedTuple

from cdt_fast.errors import MissingExtra
from cdt_fast.files import write_text
from cdt_fast.tables import as_markdown, as_text
from cdt_fast.tasks import check_comparable
from cdt_fast.training import figures
from cdt_fast.training.report import LARGEST_RATIO, LAST_LOSS
from cdt_fast.training.results import t_quantile
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


def write_study(folder: Path, title: str, cells: Cells, baseline: str, command: str) -> Path:
    """Print the tables and write them to `study.md` in `folder`, and with pictures to `study.html`.

    Returns:
        The path of `study.html`, a single file that needs no other.

    Raises:
        InputError: runs of a source were not measured on the same data.
    """
    for runs in cells.values():
        check_comparable([run for group in runs.values() for run in group], of_one_noise=False)
    every = tables(cells, baseline)
    for table in every:
        print("\n" + as_text(table))
    print()
    lines = [f"# {title}", "", f"Made by `{command}`.", "", _READING, ""]
    for table in every:
        lines += [as_markdown(table), ""]
    write_text(folder / "study.md", "\n".join(lines))
    try:
        pictures = "\n".join(_figure(figure, caption) for figure, caption in _pictures(cells, baseline))
    except MissingExtra as error:
        pictures = f"<p>No pictures: {error}</p>"
    path = folder / "study.html"
    words = {"title": title, "command": command, "reading": _READING}
    page = Template(_PAGE).substitute(
        {name: html.escape(word) for name, word in words.items()},
        pictures=pictures,
        tables="\n".join(map(_table, every)),
    )
    write_text(path, page)
    return path


_READING = (
    "Held-out data, at the training noise where nothing else is said. ℓ_L: the last depth; exits: the geometric mean "
    "of the losses of depths 1 to L−1 (neither is set beside that of a training at other noise); largest ratio: of a "
    "depth's loss to that of the depth before. The learning rate of a run is the one of the grid with the lowest "
    "validation loss at the last depth with the first seed; the grid is the same for all."
)


def _pictures(cells: Cells, baseline: str) -> list[tuple[Any, str]]:
    """Figures with their captions: the differences with their intervals, and what the exits reach."""
    measure, reached = exits(cells, baseline)
    drawn, found = [], differences(cells, baseline)
    if any(value is not None for values in found.values() for value in values.values()):
        caption = f"Percent against {baseline}, with 95 % intervals; left of the gray line is less"
        drawn.append((_of_differences(found), caption))
    if any(value is not None for values in reached.values() for value in values):
        caption = f"{measure} after each layer, geometric means over sources and seeds"
        drawn.append((_of_exits(measure, reached), caption))
    return drawn


def _of_differences(differences: Mapping[str, Mapping[str, Difference | None]]) -> Any:
    names = list(next(iter(differences.values())))
    figure, panels = figures.axes_of(width=2.6, columns=len(differences), together=True)
    figure.set_figheight(0.8 + 0.24 * len(names))
    for panel, (heading, values) in zip(panels, differences.items(), strict=True):
        panel.axvline(0, color=figures.GRAY, linewidth=1, zorder=0)
        for place, name in enumerate(names):
            value = values[name]
            if value is None:
                continue
            if value.low is not None:
                panel.plot([value.low, value.high], [place, place], color=figures.COLORS[0], linewidth=1.4)
            panel.plot(value.mean, place, "o", color=figures.COLORS[0], markersize=4)
        panel.set_title(heading, fontsize="small")
        # Linear up to ten percent and by factors beyond: some exits change a hundredfold.
        panel.set_xscale("symlog", linthresh=10)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.set_yticks(range(len(names)), names, fontsize="x-small")
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.tick_params(axis="x", labelsize="xx-small")
    return figure


def _of_exits(measure: str, reached: Mapping[str, list[float | None]]) -> Any:
    figure, (axis,) = figures.axes_of(width=7.2)
    for index, (name, values) in enumerate(reached.items()):
        color, style = figures.color_and_style(index)
        known = [(depth, value) for depth, value in enumerate(values, 1) if value is not None]
        if known:
            axis.plot(*zip(*known, strict=True), f"o{style}", color=color, label=name, markersize=4)
    axis.set(xlabel="layers run")
    figures.set_log_scale(axis, measure)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False, fontsize="x-small", loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return figure


def _figure(figure: Any, caption: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    figures.pyplot().close(figure)
    image = f'<img src="data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
    return f"<figure>{image}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _table(rows: Table) -> str:
    head = "".join(f"<th>{html.escape(word)}</th>" for word in rows[0])
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(word)}</td>" for word in row) + "</tr>" for row in rows[1:])
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


# A click on a heading sorts by its column: by the number that a cell begins with, else by its word; again, backward.
_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
img { max-width: 100%; }
table { border-collapse: collapse; font-size: .85rem; margin: 1.5rem 0; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
th { cursor: pointer; }
</style>
<h1>$title</h1>
<p>Made by <code>$command</code>.</p>
<p>$reading</p>
$pictures
$tables
<script>
for (const head of document.querySelectorAll("th")) {
  let sign = -1;
  head.onclick = () => {
    sign = -sign;
    const body = head.closest("table").tBodies[0], word = row => row.cells[head.cellIndex].textContent;
    const order = (a, b) => parseFloat(a) - parseFloat(b) || a.localeCompare(b);
    body.append(...[...body.rows].sort((a, b) => sign * order(word(a), word(b))));
  };
}
</script>
"""
