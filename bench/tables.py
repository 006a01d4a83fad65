"""The tables of a run: one a suite, from what is in its results file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEAD: tuple[str, ...] = ("way", "role", "median", "spread", "× eager", "× best peer", "peak MiB", "of the floor")


def case_title(case: Mapping[str, Any]) -> str:
    """Name and sizes of a case, with its note."""
    shape = ", ".join(f"{name} {value:,}" for name, value in case["shape"].items())
    note = f"; {case['note']}" if case["note"] else ""
    return f"{case['case']} ({shape}{note})"


def case_table(case: Mapping[str, Any]) -> list[list[str]]:
    """A row a way; a way that was not timed has its reason in place of the figures."""
    rows = [list(HEAD)]
    for name, way in case["ways"].items():
        rows.append([name, way["role"], *_cells(way)])
    return rows


def reasons(case: Mapping[str, Any]) -> list[str]:
    """Why ways were not timed or have no peak memory, and what a way says about itself; a line each."""
    found = []
    without_peak: dict[str, list[str]] = {}
    for name, way in case["ways"].items():
        if way["status"] != "timed":
            found.append(f"{name}: {way['status']}: {way['reason']}")
        elif way["peak_bytes"] is None:
            without_peak.setdefault(way["peak_reason"], []).append(name)
        if way.get("facts"):
            facts = ", ".join(f"{fact} {value:g}" for fact, value in way["facts"].items())
            found.append(f"{name}: {facts}")
    return found + [f"no peak memory of {', '.join(names)}: {reason}" for reason, names in without_peak.items()]


def fit_table(fits: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row a series and way: the exponents of time and of peak memory."""
    rows: dict[tuple[str, str], list[str]] = {}
    for fit in fits:
        sizes = "…".join(f"{size:,}" for size in (fit["sizes"][0], fit["sizes"][-1]))
        row = rows.setdefault((fit["series"], fit["way"]), [fit["series"], sizes, fit["way"], "", "", ""])
        if fit["figure"] == "median_seconds":
            row[3:5] = [f"{fit['exponent']:.2f}", f"{fit['explained']:.3f}"]
        else:
            row[5] = f"{fit['exponent']:.2f}"
    head = ["series", "sizes", "way", "exponent of time", "r²", "exponent of peak memory"]
    return [head, *rows.values()] if rows else []


def _cells(way: Mapping[str, Any]) -> list[str]:
    if way["status"] != "timed":
        return [way["status"], "", "", "", "", ""]
    low, high = way["spread_seconds"]
    peak = way.get("peak_bytes")
    return [
        seconds(way["median_seconds"]),
        f"{seconds(low)}..{seconds(high)}",
        _ratio(way["over_eager"]),
        _ratio(way["over_best_peer"]),
        "" if peak is None else f"{peak / 2**20:,.1f}",
        f"{100 * way['share_of_floor']:.1f} %" if "share_of_floor" in way else "",
    ]


def seconds(value: float) -> str:
    """A time with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
