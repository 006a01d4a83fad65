"""The picture of a results file: a line a case, with a mark for each implementation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdt_fast.checks import require
from cdt_fast.files import replaced_atomically

Case = Mapping[str, Any]


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
                figure = _picture(timed, f"{contents['suite']} on {contents['name']}")
                with replaced_atomically(path.with_suffix(".png")) as temporary:
                    figure.savefig(temporary, dpi=110, bbox_inches="tight")
                pyplot.close(figure)
    except ImportError as error:
        print(f"no pictures: {error}")


def _ratios(case: Case) -> dict[str, float]:
    """How many times as fast as the baseline each implementation is; ours is called "cdt_fast"."""
    every = [(name, one) for name, one in case["implementations"].items() if one.get("over_eager")]
    named = [("cdt_fast" if one["role"] == "ours" else name, one) for name, one in every if one["role"] != "eager"]
    return {name: one["over_eager"] for name, one in named}


def _picture(cases: Sequence[Case], title: str) -> Any:
    """A line a case, a mark an implementation: how many times as fast as the baseline, which is the line at 1."""
    from matplotlib import pyplot, ticker

    from cdt_fast.training.figures import COLORS, GRAY

    titles = without_common_start([case["case"] for case in cases])
    size = (5.5 + 0.068 * max(map(len, titles)), 1.2 + 0.26 * len(cases))
    figure, axis = pyplot.subplots(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize="medium")
    axis.axvline(1.0, color=GRAY, linewidth=1, zorder=0)
    found = [(name, ratio, place) for place, case in enumerate(cases) for name, ratio in _ratios(case).items()]
    peers = [name for name in dict.fromkeys(name for name, *_ in found) if name != "cdt_fast"]
    marks = zip(itertools.cycle("s^vDP*X<>"), itertools.cycle([COLORS[0], *COLORS[2:]]), strict=False)
    styles = ("o", COLORS[1]), *itertools.islice(marks, len(peers))
    for name, (mark, color) in zip(["cdt_fast", *peers], styles, strict=True):
        _, ratios, places = zip(*(one for one in found if one[0] == name), strict=True)
        style: dict[str, Any] = {"fillstyle": "none", "zorder": 1} if name in peers else {"markersize": 8, "zorder": 2}
        axis.plot(ratios, places, marker=mark, color=color, label=name, linestyle="none", **style)
    for name, ratio, place in found:
        if name == "cdt_fast":
            above = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
            axis.annotate(f"{ratio:.2f}", (ratio, place), fontsize="xx-small", **above)
    axis.set_yticks(range(len(cases)), titles, fontsize="x-small")
    axis.set_ylim(len(cases) - 0.5, -0.7)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_xlabel("times as fast as the baseline, the gray line", fontsize="small")
    axis.grid(axis="y", alpha=0.25)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize="x-small")
    return figure


def without_common_start(names: Sequence[str]) -> list[str]:
    """The names without the words that all of them begin with."""
    words = [name.split(", ") for name in names]
    while len(words) > 1 and len({tuple(one[:1]) for one in words}) == 1:
        words = [one[1:] for one in words]
    return [", ".join(one) for one in words]
