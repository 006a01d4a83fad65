"""The tables of a suite: every way on a terminal, a row a case in the document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cdt_fast.bench.goals import ours
from cdt_fast.tables import as_text

HEAD: tuple[str, ...] = (
    "way",
    "role",
    "rounds",
    "median",
    "spread",
    "× eager",
    "× best peer",
    "peak MiB",
    "of the floor",
)
CASE_HEAD: tuple[str, ...] = (
    "case",
    "baseline",
    "best peer",
    "cdt_fast",
    "spread",
    "× baseline",
    "× best peer",
    "peak MiB (baseline's)",
    "of the floor",
    "run",
)

Case = Mapping[str, Any]


def suite_as_text(name: str, suite: Mapping[str, Any]) -> str:
    """One table of all ways of all cases, each case under its name, with what was not timed and why."""
    lines = ["", f"== {name} ==", *([suite["reason"]] if suite["reason"] else [])]
    ways = [list(HEAD), *([way, *_cells(figures)] for case in suite["cases"] for way, figures in case["ways"].items())]
    if suite["cases"]:
        table = as_text(ways).splitlines()
        lines += table[:2]
        rows = iter(table[2:])
        for case in suite["cases"]:
            lines += ["", case_title(case), *(next(rows) for _ in case["ways"])]
            lines += [f"  {reason}" for reason in reasons(case)]
    if suite["fits"]:
        lines += ["", as_text(fit_table(suite["fits"]))]
    return "\n".join(lines)


def case_title(case: Case) -> str:
    """Name and sizes of a case, with its note."""
    shape = ", ".join(f"{name} {value:,}" for name, value in case["shape"].items())
    note = f"; {case['note']}" if case["note"] else ""
    return f"{case['case']} ({shape}{note})"


def reasons(case: Case) -> list[str]:
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


def case_table(cases: Sequence[Case], runs: Mapping[str, str], notes: Sequence[str]) -> list[list[str]]:
    """A row a case in which anything was timed: `cdt_fast` beside the baseline and its best peer.

    Args:
        cases: of one suite.
        runs: what the table calls each run.
        notes: those of the cases, which the table refers to by number.
    """
    rows = [list(CASE_HEAD)]
    for case in cases:
        baseline = next(((name, way) for name, way in case["ways"].items() if way["role"] == "eager"), None)
        own = ours(case)
        if not any(way["status"] == "timed" for way in case["ways"].values()):
            continue
        note = f" ({notes.index(case['note']) + 1})" if case["note"] else ""
        peer = case["best_peer"]
        rows.append(
            [
                case["case"] + note,
                _named(*baseline) if baseline is not None else "",
                "" if peer is None else _named(peer, case["ways"][peer]),
                *(["", "", "", ""] if own is None else _own_cells(own)),
                _peaks(own, None if baseline is None else baseline[1]),
                "" if own is None else _share(own),
                runs[case["run"]],
            ]
        )
    return rows


def grouped_reasons(cases: Sequence[Case]) -> list[str]:
    """What the table of the document leaves out, the same of several cases once; what is of one case names it."""
    groups: dict[str, dict[str, list[str]]] = {}

    def say(what: str, way: str, case: Case) -> None:
        groups.setdefault(what, {}).setdefault(way, []).append(case["case"])

    for case in cases:
        rounds = max((len(way["seconds"]) for way in case["ways"].values() if way["status"] == "timed"), default=0)
        for name, way in case["ways"].items():
            if way["status"] != "timed":
                say(f"{way['status']}: {way['reason']}", name, case)
            elif len(way["seconds"]) < rounds:
                say(f"timed in the first {len(way['seconds'])} rounds alone, as it is slow", name, case)
            if way.get("facts"):
                say(", ".join(f"{fact} {value:g}" for fact, value in way["facts"].items()), name, case)
    found = []
    for what, ways in groups.items():
        shown = (f"{way} ({of[0] if len(of) == 1 else f'{len(of)} cases'})" for way, of in ways.items())
        found.append(f"{'; '.join(shown)}: {what}")
    return found


def fit_table(fits: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row a series and way: the exponents of time and of peak memory."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for fit in fits:
        sizes = "…".join(f"{size:,}" for size in (fit["sizes"][0], fit["sizes"][-1]))
        row = rows.setdefault((fit["series"], fit["way"], sizes), [fit["series"], sizes, fit["way"], "", "", ""])
        if fit["figure"] == "median_seconds":
            row[3:5] = [f"{fit['exponent']:.2f}", f"{fit['explained']:.3f}"]
        else:
            row[5] = f"{fit['exponent']:.2f}"
    head = ["series", "sizes", "way", "exponent of time", "r²", "exponent of peak memory"]
    return [head, *rows.values()] if rows else []


def series_table(cases: Sequence[Case], runs: Mapping[str, str]) -> list[list[str]]:
    """A row a series and way: the median at each size."""
    rows: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for name, way in case["ways"].items():
            if way["status"] == "timed":
                row = rows.setdefault((case["series"], name), [case["series"], name, "", ""])
                row[2] += f"{', ' if row[2] else ''}{case['shape'][case['varied']]:,}: {seconds(way['median_seconds'])}"
                if runs[case["run"]] not in row[3].split(", "):
                    row[3] += f"{', ' if row[3] else ''}{runs[case['run']]}"
    return [["series", "way", "median at each size", "run"], *rows.values()]


def seconds(value: float) -> str:
    """A time with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def _cells(way: Mapping[str, Any]) -> list[str]:
    if way["status"] != "timed":
        return [way["role"], "", way["status"], "", "", "", "", ""]
    peak = way["peak_bytes"]
    return [
        way["role"],
        str(len(way["seconds"])),
        seconds(way["median_seconds"]),
        _spread(way),
        _ratio(way["over_eager"]),
        _ratio(way["over_best_peer"]),
        "" if peak is None else f"{peak / 2**20:,.1f}",
        _share(way),
    ]


def _own_cells(way: Mapping[str, Any]) -> list[str]:
    return [
        seconds(way["median_seconds"]),
        f"{_spread(way)} in {len(way['seconds'])}",
        _ratio(way["over_eager"]),
        _ratio(way["over_best_peer"]),
    ]


def _named(name: str, way: Mapping[str, Any]) -> str:
    return f"{name} {seconds(way['median_seconds']) if way['status'] == 'timed' else way['status']}"


def _spread(way: Mapping[str, Any]) -> str:
    low, high = way["spread_seconds"]
    return f"{seconds(low)}..{seconds(high)}"


def _peaks(own: Mapping[str, Any] | None, baseline: Mapping[str, Any] | None) -> str:
    peak, other = ((way or {}).get("peak_bytes") for way in (own, baseline))
    return ("" if peak is None else f"{peak / 2**20:,.1f}") + ("" if other is None else f" ({other / 2**20:,.1f})")


def _share(way: Mapping[str, Any]) -> str:
    return f"{100 * way['share_of_floor']:.1f} %" if "share_of_floor" in way else ""


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
