"""The picture of a results file: a line a case, with a mark for each implementation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdt_fast.files import replaced_atomically
from cdt_fast.training.figures import COLORS, GRAY, pyplot


def draw(path: Path, title: str, cases: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw how many times as fast as the baseline, which is the line at 1, the implementations of each case are.

    Args:
        path: the PNG.
        title: stands above the picture.
        cases: the implementations of a case, as the results file has them, by the title of the case.
    """
    marks: dict[str, list[tuple[float, int]]] = {"cdt_fast": []}
    for place, implementations in enumerate(cases.values()):
        for name, one in implementations.items():
            if one["role"] != "eager" and one.get("over_eager"):
                marks.setdefault("cdt_fast" if one["role"] == "ours" else name, []).append((one["over_eager"], place))
    figure, axis = pyplot().subplots(figsize=(11, 1.2 + 0.26 * len(cases)), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    axis.axvline(1.0, color=GRAY, linewidth=1, zorder=0)
    for (name, found), mark, color in zip(marks.items(), itertools.cycle("os^vDP*X<>"), itertools.cycle(COLORS)):
        style: dict[str, Any] = {"markersize": 8, "zorder": 2} if name == "cdt_fast" else {"fillstyle": "none"}
        axis.plot([ratio for ratio, _ in found], [place for _, place in found], mark, color=color, label=name, **style)
    for ratio, place in marks["cdt_fast"]:
        above = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
        axis.annotate(f"{ratio:.2f}", (ratio, place), fontsize="xx-small", **above)
    axis.set_yticks(range(len(cases)), list(cases), fontsize="x-small")
    axis.set_ylim(len(cases) - 0.5, -0.7)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel("times as fast as the baseline, the gray line", fontsize="small")
    axis.grid(axis="y", alpha=0.25)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize="x-small")
    with replaced_atomically(path) as temporary:
        figure.savefig(temporary, dpi=110)
    pyplot().close(figure)
