"""How a figure grows with a size: the exponent of `figure ~ size^exponent`, by least squares on logarithms."""

from __future__ import annotations

import math
import statistics
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
    explained = 1.0 if len(set(y)) == 1 else statistics.correlation(x, y) ** 2
    return statistics.linear_regression(x, y).slope, explained


def fit_series(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A fit of time and of peak memory for every series and implementation among measured cases.

    Returns:
        For each: `series`, `varied`, `implementation`, `figure` ("median_seconds" or "peak_bytes"), `exponent`,
        `explained`, and the `sizes` that it is over. Nothing where fewer than three sizes were measured.
    """
    points: dict[tuple[str, str, str, str], list[tuple[float, float]]] = {}
    for case in cases:
        for candidate, figures in case["implementations"].items() if case["series"] else ():
            for figure in ("median_seconds", "peak_bytes"):
                if figures.get(figure):
                    key = (case["series"], case["varied"], candidate, figure)
                    points.setdefault(key, []).append((case["shape"][case["varied"]], figures[figure]))
    fits = []
    for key, measured in points.items():
        sizes, values = zip(*sorted(measured), strict=True)
        if len(sizes) >= _FEWEST:
            exponent, explained = fit_exponent(sizes, values)
            named = dict(zip(("series", "varied", "implementation", "figure"), key, strict=True))
            fits.append({**named, "exponent": exponent, "explained": explained, "sizes": list(sizes)})
    return fits
