"""How a figure grows with a size: the exponent of `figure ~ size^exponent`, by least squares on logarithms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_FEWEST = 3


def fit_exponent(sizes: Sequence[float], figures: Sequence[float]) -> tuple[float, float]:
    """The exponent, and the share of the figures' variance (of logarithms) that the line explains.

    Args:
        sizes: above 0, at least two different ones.
        figures: above 0, one a size.
    """
    x, y = [math.log(size) for size in sizes], [math.log(figure) for figure in figures]
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    spread = math.fsum((one - mean_x) ** 2 for one in x)
    exponent = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    total = math.fsum((one - mean_y) ** 2 for one in y)
    left = math.fsum((b - mean_y - exponent * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return exponent, 1.0 if total == 0 else 1 - left / total


def fit_series(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A fit of time and of peak memory for every series and way among measured cases.

    Returns:
        For each: `series`, `varied`, `way`, `figure` ("median_seconds" or "peak_bytes"), `exponent`, `explained`, and
        the `sizes` that it is over. Nothing where fewer than three sizes were measured.
    """
    points: dict[tuple[str, str, str, str], list[tuple[float, float]]] = {}
    for case in cases:
        for way, figures in case["ways"].items() if case["series"] else ():
            for figure in ("median_seconds", "peak_bytes"):
                if figures.get(figure):
                    key = (case["series"], case["varied"], way, figure)
                    points.setdefault(key, []).append((case["shape"][case["varied"]], figures[figure]))
    found = []
    for (series, varied, way, figure), measured in points.items():
        sizes, values = zip(*sorted(measured), strict=True)
        if len(sizes) < _FEWEST:
            continue
        exponent, explained = fit_exponent(sizes, values)
        found.append(
            {
                "series": series,
                "varied": varied,
                "way": way,
                "figure": figure,
                "exponent": exponent,
                "explained": explained,
                "sizes": list(sizes),
            }
        )
    return found
