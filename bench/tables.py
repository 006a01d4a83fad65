"""The tables of a suite: every implementation on a terminal, a row a case in the document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cdt_fast.bench.goals import timed
from cdt_fast.tables import as_text

HEAD = ("implementation", "role", "rounds", "median", "spread", "× eager", "× best peer", "peak MiB", "of the floor")
CASE_HEAD = (
    *("case", "baseline", "best peer", "cdt_fast", "spread", "× baseline", "× best peer", "peak MiB (baseline's)"),
    *("of the floor", "run"),
)

Case = Mapping[str, Any]


def suite_as_text(name: str, reason: str, cases: Sequence[Case]) -> str:
    """One table of all implementations of all cases, each case under its name, with what was not timed and why.

    Args:
        name: of the suite.
        reason: why it has no cases; empty where it has.
        cases: as they were measured.
    """
    lines = ["", f"== {name} ==", *([reason] if reason else [])]
    rows = [[name, *_cells(one)] for case in cases for name, one in case["implementations"].items()]
    if cases:
        head, rule, *table = as_text([HEAD, *rows]).splitlines()
        lines += [head, rule]
        for case in cases:
            count = len(case["implementations"])
            shape = ", ".join(f"{name} {value:,}" for name, value in case["shape"].items())
            note = f"; {case['note']}" if case["note"] else ""
            lines += ["", f"{case['case']} ({shape}{note})", *table[:count]]
            del table[:count]
            groups: dict[str, list[str]] = defaultdict(list)
            for name, remark in [*_remarks(case), *_without_peak(case)]:
                groups[remark].append(name)
            lines += [f"  {', '.join(names)}: {remark}" for remark, names in groups.items()]
    return "\n".join(lines)


def _remarks(case: Case) -> Iterator[tuple[str, str]]:
    """Names of implementations that were not timed, with the reason."""
    for name, one in case["implementations"].items():
        if one["status"] != "timed":
            yield name, f"{one['status']}: {one['reason']}"


def _without_peak(case: Case) -> Iterator[tuple[str, str]]:
    for name, one in case["implementations"].items():
        if one["status"] == "timed" and one["peak_bytes"] is None:
            yield name, f"no peak memory: {one['peak_reason']}"


def grouped_remarks(cases: Sequence[Case]) -> list[str]:
    """What the table of the document leaves out, the same of several cases once; what is of one case names it."""
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        for name, remark in _remarks(case):
            groups[remark][name].append(case["case"])
    return [
        "; ".join(f"{name} ({of[0] if len(of) == 1 else f'{len(of)} cases'})" for name, of in names.items())
        + f": {remark}"
        for remark, names in groups.items()
    ]


def case_table(cases: Sequence[Case], runs: Mapping[str, str], notes: Sequence[str]) -> list[list[str]]:
    """A row a case in which anything was timed: `cdt_fast` beside the baseline and its best peer.

    Args:
        cases: of one suite.
        runs: what the table calls each run.
        notes: those of the cases, which the table refers to by number.
    """
    rows = [list(CASE_HEAD)]
    for case in cases:
        known = case["implementations"]
        if not any(one["status"] == "timed" for one in known.values()):
            continue
        baseline = next((name for name, one in known.items() if one["role"] == "eager"), None)
        others = [
            "" if name is None else f"{name} {_median(known[name]) or known[name]['status']}"
            for name in (baseline, case["best_peer"])
        ]
        own = timed(case, "ours")
        peak, other = _mebibytes(own), _mebibytes({} if baseline is None else known[baseline])
        spread = f"{_spread(own)} in {len(own['seconds'])}" if own else ""
        ratios = [_ratio(own, "over_eager"), _ratio(own, "over_best_peer")]
        title = case["case"] + (f" ({notes.index(case['note']) + 1})" if case["note"] else "")
        cells = [_median(own), spread, *ratios, peak + (f" ({other})" if other else ""), _share(own)]
        rows.append([title, *others, *cells, runs[case["run"]]])
    return rows


def _cells(one: Mapping[str, Any]) -> list[str]:
    """Those of `HEAD` after the name."""
    if one["status"] != "timed":
        return [one["role"], "", one["status"], "", "", "", "", ""]
    figures = (_ratio(one, "over_eager"), _ratio(one, "over_best_peer"), _mebibytes(one), _share(one))
    return [one["role"], str(len(one["seconds"])), _median(one), _spread(one), *figures]


# Each is a figure of an implementation in words, empty where there is none.


def _seconds(value: float) -> str:
    """A time with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def _median(one: Mapping[str, Any]) -> str:
    return _seconds(one["median_seconds"]) if "median_seconds" in one else ""


def _spread(one: Mapping[str, Any]) -> str:
    return "..".join(map(_seconds, one["spread_seconds"]))


def _mebibytes(one: Mapping[str, Any]) -> str:
    peak = one.get("peak_bytes")
    return "" if peak is None else f"{peak / 2**20:,.1f}"


def _share(one: Mapping[str, Any]) -> str:
    return f"{100 * one['share_of_floor']:.1f} %" if "share_of_floor" in one else ""


def _ratio(one: Mapping[str, Any], name: str) -> str:
    value = one.get(name)
    return "" if value is None else f"{value:.2f}"
