"""The picture of a results file: a line a case, with a mark for each implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdt_fast.errors import require
from cdt_fast.files import replaced_atomically

Case = Mapping[str, Any]

_MARKS = "os^vDP*X<>"
# Inches: of the axis, of a letter of a label, of a line.
_AXIS, _LETTER, _LINE = 5.5, 0.068, 0.26


def write_picture(path: Path, contents: Mapping[str, Any]) -> Path | None:
    """Draw what a results file holds.

    Returns:
        `path`, or None where nothing was timed.

    Raises:
        ImportError: matplotlib, or another package that the reports need, is not installed.
    """
    require("matplotlib", "report", "drawing the bench")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [case for case in contents["cases"] if _timed(case)]
    if not timed:
        return None
    figure = _ratios(timed)
    figure.suptitle(f"{contents['suite']} on {contents['name']}", fontsize="medium")
    with replaced_atomically(path) as temporary:
        figure.savefig(temporary, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
    return path


def _timed(case: Case) -> dict[str, Any]:
    return {name: one for name, one in case["implementations"].items() if one["status"] == "timed"}


def _ratios(cases: Sequence[Case]) -> Any:
    """A line a case, a mark an implementation: how many times as fast as the baseline, which is the line at 1."""
    from matplotlib import pyplot, ticker

    from cdt_fast.training.figures import COLORS, GRAY

    ours, *others = [COLORS[1], *(color for color in COLORS if color != COLORS[1])]
    peers = list(dict.fromkeys(n for case in cases for n, one in _timed(case).items() if one["role"] == "peer"))
    titles = _without_common_start([case["case"] for case in cases])
    width = _AXIS + _LETTER * max(map(len, titles))
    figure, axis = pyplot.subplots(figsize=(width, 1.2 + _LINE * len(cases)), layout="constrained")
    axis.axvline(1.0, color=GRAY, linewidth=1, zorder=0)
    for place, case in enumerate(cases):
        for name, one in _timed(case).items():
            if one["over_eager"] is None or one["role"] == "eager":
                continue
            mine = one["role"] == "ours"
            number = 0 if mine else peers.index(name)
            axis.plot(
                one["over_eager"],
                place,
                marker="o" if mine else _MARKS[number % len(_MARKS)],
                color=ours if mine else others[number % len(others)],
                markersize=8 if mine else 6,
                fillstyle="full" if mine else "none",
                linestyle="none",
                zorder=2 if mine else 1,
                label="cdt_fast" if mine else name,
            )
            if mine:
                above = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
                axis.annotate(f"{one['over_eager']:.2f}", (one["over_eager"], place), fontsize="xx-small", **above)
    axis.set_yticks(range(len(cases)), titles, fontsize="x-small")
    axis.set_ylim(len(cases) - 0.5, -0.7)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(ticker.LogLocator(base=2, numticks=12))
    axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_xlabel("times as fast as the baseline, the gray line", fontsize="small")
    axis.tick_params(axis="x", labelsize="small")
    axis.grid(axis="y", alpha=0.25)
    axis.spines[["top", "right", "left"]].set_visible(False)
    known = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    order = [name for name in ("cdt_fast", *peers) if name in known]
    figure.legend(
        [known[name] for name in order], order, loc="outside lower left", ncols=2, frameon=False, fontsize="x-small"
    )
    return figure


def _without_common_start(names: Sequence[str]) -> list[str]:
    """The names without the words that all begin with."""
    words = [name.split(", ") for name in names]
    shortest = min(map(len, words))
    same = next((place for place in range(shortest) if len({one[place] for one in words}) > 1), 0)
    return [", ".join(one[same:]) for one in words]
