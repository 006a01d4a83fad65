"""The picture of a results file: a line a case, with a mark for each implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdt_fast.errors import require
from cdt_fast.files import replaced_atomically

Case = Mapping[str, Any]

_MARKS = "os^vDP*X<>"
_OWN = {"markersize": 8, "fillstyle": "full", "zorder": 2}
_PEER = {"markersize": 6, "fillstyle": "none", "zorder": 1}
# Inches: of the axis, of a letter of a label, of a line.
_AXIS, _LETTER, _LINE = 5.5, 0.068, 0.26


def draw(files: Mapping[Path, Mapping[str, Any]]) -> None:
    """Draw each results file, by its path, beside it; without matplotlib a line says that there are no pictures."""
    try:
        require("matplotlib", "report", "drawing the bench")
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        for path, contents in files.items():
            timed = [case for case in contents["cases"] if _timed(case)]
            if timed:
                figure = _ratios(timed)
                figure.suptitle(f"{contents['suite']} on {contents['name']}", fontsize="medium")
                with replaced_atomically(path.with_suffix(".png")) as temporary:
                    figure.savefig(temporary, dpi=110, bbox_inches="tight")
                pyplot.close(figure)
    except ImportError as error:
        print(f"no pictures: {error}")


def _timed(case: Case) -> dict[str, Any]:
    return {name: one for name, one in case["implementations"].items() if one["status"] == "timed"}


def _ratios(cases: Sequence[Case]) -> Any:
    """A line a case, a mark an implementation: how many times as fast as the baseline, which is the line at 1."""
    from matplotlib import pyplot, ticker

    from cdt_fast.training.figures import COLORS, GRAY

    ours, *others = [COLORS[1], *(color for color in COLORS if color != COLORS[1])]
    peers = list(dict.fromkeys(n for case in cases for n, one in _timed(case).items() if one["role"] == "peer"))
    styles: dict[str, dict[str, Any]] = {
        name: {"marker": _MARKS[number % len(_MARKS)], "color": others[number % len(others)], "label": name, **_PEER}
        for number, name in enumerate(peers)
    }
    own = {"marker": "o", "color": ours, "label": "cdt_fast", **_OWN}
    titles = _without_common_start([case["case"] for case in cases])
    width = _AXIS + _LETTER * max(map(len, titles))
    figure, axis = pyplot.subplots(figsize=(width, 1.2 + _LINE * len(cases)), layout="constrained")
    axis.axvline(1.0, color=GRAY, linewidth=1, zorder=0)
    for place, case in enumerate(cases):
        for name, one in _timed(case).items():
            if one["over_eager"] is None or one["role"] == "eager":
                continue
            axis.plot(one["over_eager"], place, linestyle="none", **styles.get(name, own))
            if one["role"] == "ours":
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
    handles = [known[name] for name in order]
    figure.legend(handles, order, loc="outside lower left", ncols=2, frameon=False, fontsize="x-small")
    return figure


def _without_common_start(names: Sequence[str]) -> list[str]:
    """The names without the words that all begin with."""
    words = [name.split(", ") for name in names]
    shortest = min(map(len, words))
    same = next((place for place in range(shortest) if len({one[place] for one in words}) > 1), 0)
    return [", ".join(one[same:]) for one in words]
