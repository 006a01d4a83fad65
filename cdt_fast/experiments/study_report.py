"""The report of a study: its tables in Markdown, and with pictures as one page of HTML that needs no other file."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from cdt_fast.errors import MissingExtra
from cdt_fast.experiments.study import Cells, Difference, differences, exits, tables
from cdt_fast.files import write_text
from cdt_fast.tables import as_markdown, as_text
from cdt_fast.tasks import check_comparable
from cdt_fast.training import figures
from cdt_fast.training.task import Table


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
