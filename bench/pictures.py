"""The pictures of a run: bars of the ratios, and lines over the sizes with their exponents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdt_fast.errors import require
from cdt_fast.files import replaced_atomically


def write_pictures(folder: Path, stem: str, result: Mapping[str, Any]) -> list[Path]:
    """Draw `stem-suite.png` into `folder` for every suite of a run in which something was timed.

    Raises:
        ImportError: matplotlib, or another package that the reports need, is not installed.
    """
    require("matplotlib", "report", "drawing the bench")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    for name, suite in result["suites"].items():
        timed = [case for case in suite["cases"] if _timed(case)]
        if not timed:
            continue
        figure = _lines(timed, suite["fits"]) if suite["fits"] else _bars(timed)
        figure.suptitle(f"{name}, {result['machine']['name']}", fontsize="medium")
        path = folder / f"{stem}-{name}.png"
        with replaced_atomically(path) as temporary:
            figure.savefig(temporary, dpi=110, bbox_inches="tight")
        pyplot.close(figure)
        drawn.append(path)
    return drawn


def _timed(case: Mapping[str, Any]) -> dict[str, Any]:
    return {name: way for name, way in case["ways"].items() if way["status"] == "timed"}


def _bars(cases: Sequence[Mapping[str, Any]]) -> Any:
    """A group a case, a bar a way: how many times as fast as eager."""
    from matplotlib import pyplot

    from cdt_fast.runs.figures import COLOURS, GREY

    rows = [(case, name, way) for case in cases for name, way in _timed(case).items() if way["over_eager"] is not None]
    figure, axis = pyplot.subplots(figsize=(7.5, 0.8 + 0.24 * (len(rows) + 1.5 * len(cases))))
    colours = {"eager": GREY, "peer": COLOURS[0], "ours": COLOURS[1]}
    place, ticks, labels = 0.0, [], []
    for case in cases:
        axis.text(0, place, case["case"], fontsize="x-small", fontweight="bold", va="center")
        place += 1
        for owner, name, way in rows:
            if owner is not case:
                continue
            axis.barh(place, way["over_eager"], color=colours[way["role"]], height=0.8)
            axis.text(way["over_eager"], place, f" {way['over_eager']:.2f}", fontsize="x-small", va="center")
            ticks.append(place)
            labels.append(name)
            place += 1
        place += 0.5
    axis.set_yticks(ticks, labels, fontsize="x-small")
    axis.axvline(1.0, color=GREY, linewidth=0.8)
    axis.set(xlabel="times as fast as eager (median of the rounds' ratios)")
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _lines(cases: Sequence[Mapping[str, Any]], fits: Sequence[Mapping[str, Any]]) -> Any:
    """A panel a series, a line a way, both axes logarithmic."""
    from matplotlib import pyplot

    from cdt_fast.runs.figures import COLOURS

    series = list(dict.fromkeys(case["series"] for case in cases if case["series"]))
    columns = min(3, len(series))
    count = -(-len(series) // columns)
    figure, axes = pyplot.subplots(count, columns, figsize=(4.2 * columns, 3.4 * count), squeeze=False)
    for axis, title in zip(axes.flat, series, strict=False):
        members = [case for case in cases if case["series"] == title]
        varied = members[0]["varied"]
        for colour, way in zip(COLOURS, members[0]["ways"], strict=False):
            points = [
                (case["shape"][varied], _timed(case)[way]["median_seconds"]) for case in members if way in _timed(case)
            ]
            fitted = [
                fit for fit in fits if (fit["series"], fit["way"], fit["figure"]) == (title, way, "median_seconds")
            ]
            label = f"{way}: {varied}^{fitted[0]['exponent']:.2f}" if fitted else way
            axis.plot(*zip(*sorted(points), strict=True), "o-", color=colour, label=label) if points else None
        axis.set(xscale="log", yscale="log", xlabel=varied, ylabel="seconds", title=title)
        axis.title.set_fontsize("small")
        axis.legend(frameon=False, fontsize="x-small")
        axis.grid(alpha=0.25)
    for axis in axes.flat[len(series) :]:
        axis.axis("off")
    figure.tight_layout()
    return figure
