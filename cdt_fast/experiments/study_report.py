"""The report of a study: its tables in Markdown, and with pictures as one page of HTML that needs no other file."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from cdt_fast.errors import MissingExtra
from cdt_fast.experiments.study import Cells, Difference, Exits, differences, exits, tables
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
    pictures = _pictures(cells, baseline)
    path = folder / "study.html"
    write_text(path, _page(title, command, every, pictures))
    return path


_READING = (
    "Held-out data, at the training noise where nothing else is said. ℓ_L: the last depth; exits: the geometric mean "
    "of the losses of depths 1 to L−1 (neither is set beside that of a training at other noise); largest ratio: of a "
    "depth's loss to that of the depth before. The learning rate of a run is the one of the grid with the lowest "
    "validation loss at the last depth with the first seed; the grid is the same for all."
)


class Picture(NamedTuple):
    """A drawing in SVG, and what it shows."""

    svg: bytes
    caption: str


def _pictures(cells: Cells, baseline: str) -> list[Picture] | None:
    """The differences with their intervals, and what the exits reach; None where matplotlib is not installed."""
    try:
        figures.use_without_screen()
    except MissingExtra:
        return None
    drawn, reached = [], exits(cells, baseline)
    if any(value is not None for values in reached.of_run.values() for value in values):
        drawn.append(_of_exits(reached))
    found = differences(cells, baseline)
    if any(value is not None for values in found.values() for value in values.values()):
        caption = f"Percent against {baseline}, with 95 % intervals; left of the gray line is less"
        drawn.insert(0, (_of_differences(found), caption))
    return [Picture(_svg(figure), caption) for figure, caption in drawn]


def _of_differences(differences: Mapping[str, Mapping[str, Difference | None]]) -> Any:
    names = list(next(iter(differences.values())))
    size = (2.1 * len(differences) + 1.5, 0.8 + 0.24 * len(names))
    figure, panels = figures.pyplot().subplots(1, len(differences), figsize=size, sharey=True, squeeze=False)
    for panel, (heading, values) in zip(panels[0], differences.items(), strict=True):
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
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _of_exits(exits: Exits) -> tuple[Any, str]:
    figure, (axis,) = figures.axes_of(width=7.2)
    for index, (name, values) in enumerate(exits.of_run.items()):
        color, style = figures.color_and_style(index)
        known = [(depth, value) for depth, value in enumerate(values, 1) if value is not None]
        if known:
            axis.plot(*zip(*known, strict=True), f"o{style}", color=color, label=name, markersize=4)
    axis.set(xlabel="layers run")
    figures.set_log_scale(axis, exits.measure)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False, fontsize="x-small", loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return figure, f"{exits.measure} after each layer, geometric means over sources and seeds"


def _svg(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    figures.pyplot().close(figure)
    return buffer.getvalue()


def _page(title: str, command: str, tables: Sequence[Table], drawn: Sequence[Picture] | None) -> str:
    if drawn is None:
        shown = "<p>No pictures: matplotlib is not installed (the extra report).</p>"
    else:
        shown = "\n".join(map(_figure, drawn))
    words = {"title": title, "command": command, "reading": _READING}
    return Template(_PAGE).substitute(
        {name: html.escape(word) for name, word in words.items()},
        pictures=shown,
        tables="\n".join(map(_table, tables)),
    )


def _figure(picture: Picture) -> str:
    caption = html.escape(picture.caption)
    data = base64.b64encode(picture.svg).decode()
    image = f'<img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _table(rows: Table) -> str:
    head = "".join(f'<th scope="col"><button>{html.escape(word)}</button></th>' for word in rows[0])
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(word)}</td>" for word in row) + "</tr>" for row in rows[1:])
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


# A click on a heading sorts by its column, by the number that a cell begins with where all have one; a second click
# turns the order; empty cells stay at the end.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; line-height: 1.25; text-wrap: balance; }
p { max-width: 46rem; }
code { font-size: .9em; overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; overflow-x: auto; }
img { background: #fff; max-width: 100%; height: auto; }
figcaption { font-size: .85rem; opacity: .75; }
.wide { overflow-x: auto; margin: 1.5rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
tbody tr:hover { background: var(--soft); }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
</style>
</head>
<body>
<h1>$title</h1>
<p>Made by <code>$command</code>.</p>
<p>$reading</p>
$pictures
$tables
<script>
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, column = head.cellIndex, body = head.closest("table").tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows], word = row => row.cells[column].textContent;
    const filled = rows.filter(row => word(row) !== "");
    const numbers = filled.every(row => !Number.isNaN(parseFloat(word(row))));
    filled.sort((a, b) => numbers ? parseFloat(word(a)) - parseFloat(word(b)) : word(a).localeCompare(word(b)));
    if (down) filled.reverse();
    body.append(...filled, ...rows.filter(row => word(row) === ""));
  });
}
</script>
</body>
</html>
"""
