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


def suite_as_text(name: str, cases: Sequence[Case]) -> str:
    """One table of all implementations of all cases of a suite, with what was not timed and why."""
    every = [named for case in cases for named in case["implementations"].items()]
    rows = [[name, one["role"], *_words(one).values()] for name, one in every]
    head, rule, *table = as_text([HEAD, *rows]).splitlines()
    lines = ["", f"== {name} ==", head, rule]
    for case in cases:
        count = len(case["implementations"])
        shape = ", ".join(f"{name} {value:,}" for name, value in case["shape"].items())
        note = f"; {case['note']}" if case["note"] else ""
        lines += ["", f"{case['case']} ({shape}{note})", *table[:count]]
        del table[:count]
        lines += [f"  {name}: {remark}" for name, remark in _remarks(case)]
        for name, one in case["implementations"].items():
            if one["status"] == "timed" and one["peak_bytes"] is None:
                lines.append(f"  {name}: no peak memory: {one['peak_reason']}")
    return "\n".join(lines)


def _remarks(case: Case) -> Iterator[tuple[str, str]]:
    """Names of implementations that were not timed, with the reason."""
    for name, one in case["implementations"].items():
        if one["status"] != "timed":
            yield name, f"{one['status']}: {one['reason']}"


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
    """A row a case in which anything was timed: `cdt_fast` beside the baseline and its best peer, what the table calls
    the run, and the number of the case's note."""
    rows = [list(CASE_HEAD)]
    for case in cases:
        words = {name: _words(one) for name, one in case["implementations"].items()}
        if not any(one["rounds"] for one in words.values()):
            continue
        baseline = next((name for name, one in case["implementations"].items() if one["role"] == "eager"), "")
        others = [f"{name} {words[name]['median']}" if name else "" for name in (baseline, case["best_peer"])]
        own = _words(timed(case, "ours"))
        spread = f"{own['spread']} in {own['rounds']}" if own["rounds"] else ""
        other_peak = words[baseline]["peak"] if baseline else ""
        peak = own["peak"] + (f" ({other_peak})" if other_peak else "")
        title = case["case"] + (f" ({notes.index(case['note']) + 1})" if case["note"] else "")
        ratios = [own["over_eager"], own["over_best_peer"]]
        rows.append([title, *others, own["median"], spread, *ratios, peak, own["share_of_floor"], runs[case["run"]]])
    return rows


def _words(one: Mapping[str, Any]) -> dict[str, str]:
    """The figures of an implementation in words, in the order of `HEAD`; in place of its time why there is none."""
    columns = ["rounds", "median", "spread", "over_eager", "over_best_peer", "peak", "share_of_floor"]
    words = dict.fromkeys(columns, "")
    words["median"] = one.get("status", "")
    if words["median"] == "timed":
        words["rounds"] = str(len(one["seconds"]))
        words["median"] = _seconds(one["median_seconds"])
        words["spread"] = "..".join(map(_seconds, one["spread_seconds"]))
        words |= {name: f"{one[name]:.2f}" for name in ("over_eager", "over_best_peer") if one[name] is not None}
        if one["peak_bytes"] is not None:
            words["peak"] = f"{one['peak_bytes'] / 2**20:,.1f}"
        if "share_of_floor" in one:
            words["share_of_floor"] = f"{100 * one['share_of_floor']:.1f} %"
    return words


def _seconds(value: float) -> str:
    """A time with three digits and its unit."""
    unit, size = next((pair for pair in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)) if value >= pair[1]), ("ns", 1e-9))
    return f"{value / size:.3g} {unit}"
