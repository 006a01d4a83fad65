"""The picture of a results file: a line a case, with a mark for each implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdt_fast.errors import require
from cdt_fast.files import replaced_atomically

Case = Mapping[str, Any]

MARKS = "os^vDP*X<>"
OWN = {"marker": "o", "label": "cdt_fast", "markersize": 8, "zorder": 2}
PEER = {"markersize": 6, "fillstyle": "none", "zorder": 1}
# Inches: of the axis, of a letter of a label, of a line.
AXIS, LETTER, LINE = 5.5, 0.068, 0.26


def draw(files: Mapping[Path, Mapping[str, Any]]) -> None:
    """Draw each results file, by its path, beside it; without matplotlib a line says that there are no pictures."""
    try:
        require("matplotlib", "report", "drawing the bench")
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        for path, contents in files.items():
            timed = [case for case in contents["cases"] if _ratios(case)]
            if timed:
                figure = _picture(timed)
                figure.suptitle(f"{contents['suite']} on {contents['name']}", fontsize="medium")
                with replaced_atomically(path.with_suffix(".png")) as temporary:
                    figure.savefig(temporary, dpi=110, bbox_inches="tight")
                pyplot.close(figure)
    except ImportError as error:
        print(f"no pictures: {error}")


def _ratios(case: Case) -> dict[str, float]:
    """How many times as fast as the baseline each implementation is."""
    every = case["implementations"].items()
    return {name: one["over_eager"] for name, one in every if one["role"] != "eager" and one.get("over_eager")}


def _picture(cases: Sequence[Case]) -> Any:
    """A line a case, a mark an implementation: how many times as fast as the baseline, which is the line at 1."""
    from matplotlib import pyplot, ticker

    from cdt_fast.training.figures import COLORS, GRAY

    ours, *others = [COLORS[1], *(color for color in COLORS if color != COLORS[1])]
    own = [name for case in cases for name, one in case["implementations"].items() if one["role"] == "ours"]
    peers = list(dict.fromkeys(name for case in cases for name in _ratios(case) if name not in own))
    styles: dict[str, dict[str, Any]] = {
        name: {"marker": MARKS[number % len(MARKS)], "color": others[number % len(others)], "label": name, **PEER}
        for number, name in enumerate(peers)
    }
    titles = without_common_start([case["case"] for case in cases])
    width = AXIS + LETTER * max(map(len, titles))
    figure, axis = pyplot.subplots(figsize=(width, 1.2 + LINE * len(cases)), layout="constrained")
    axis.axvline(1.0, color=GRAY, linewidth=1, zorder=0)
    for place, case in enumerate(cases):
        for name, ratio in _ratios(case).items():
            axis.plot(ratio, place, linestyle="none", **styles.get(name, {**OWN, "color": ours}))
            if name in own:
                above = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
                axis.annotate(f"{ratio:.2f}", (ratio, place), fontsize="xx-small", **above)
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
    places = {"loc": "outside lower left", "ncols": 2, "frameon": False, "fontsize": "x-small"}
    figure.legend([known[name] for name in order], order, **places)
    return figure


def without_common_start(names: Sequence[str]) -> list[str]:
    """The names without the words that all of them begin with."""
    words = [name.split(", ") for name in names]
    while len(words) > 1 and len({tuple(one[:1]) for one in words}) == 1:
        words = [one[1:] for one in words]
    return [", ".join(one) for one in words]
