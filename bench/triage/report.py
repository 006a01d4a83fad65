"""What a run found: a short text for the terminal, and the table of the fastest blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdt_fast.bench.ceilings import floor_seconds
from cdt_fast.bench.triage.stages import Lines
from cdt_fast.files import write_text
from cdt_fast.tables import as_text as tables_as_text

Line = Mapping[str, Any]
Table = list[list[str]]
_MOST_KERNELS = 12


def write_blocks(lines: Lines, path: Path) -> Path | None:
    """Write the rows that the block tables should have, a line of JSON each; None where the run timed none.

    A row says which card timed it, with which versions, what it was before, and how long both take.
    """
    found = lines.read()
    machine = _first(found, part="versions and limits") or {}
    rows = []
    for line in found:
        if line.get("result") == "winner":
            taken = {name: value for name, value in line.items() if name not in ("stage", "part", "result")}
            timed_on = {"timed_on": machine.get("name"), "torch": machine.get("torch"), "triton": machine.get("triton")}
            rows.append(json.dumps({**taken, **timed_on, "source": machine.get("source")}))
    if not rows:
        return None
    write_text(path, "\n".join(rows) + "\n")
    return path


def as_text(lines: Sequence[Line]) -> list[str]:
    """The lines of the text: what the card is, and a table for each kind of result that there is."""
    sections = (_checks, _times, _by_kernel, _winners, _counters, _failures)
    tables = [rows for section in sections if len(rows := section(lines)) > 1]
    return [*_machine(lines), *(text for rows in tables for text in ("", *tables_as_text(rows).splitlines()))]


def _machine(lines: Sequence[Line]) -> Iterator[str]:
    versions, blocks = _first(lines, part="versions and limits"), _first(lines, part="block tables")
    if versions:
        yield f"{versions['name']}: torch {versions['torch']}, Triton {versions['triton']}, source {versions['source']}"
    if blocks:
        yield blocks["note"]
    products, copied = _ceilings(lines)
    ceilings = [f"{dtype} products {rate / 1e12:.0f} TFLOP/s" for dtype, rate in products.items()]
    if copied:
        ceilings.append(f"copy {copied / 1e12:.2f} TB/s")
    launch = _first(lines, part="one launch")
    if launch and "passed" in launch:
        ceilings.append(f"a launch keeps the host {launch['host_microseconds_a_call']:.0f} us")
    if ceilings:
        yield "; ".join(ceilings)


def _checks(lines: Sequence[Line]) -> Table:
    rows = [["against float64", "error", "of torch", "twice the same", ""]]
    for line in lines:
        if "relative_error_of_torch" in line:
            errors = [_short(line[name]) for name in ("relative_error", "relative_error_of_torch")]
            same, verdict = "yes" if line["bitwise_repeat"] else "NO", "" if line["passed"] else "WRONG"
            rows.append([line["part"][:80], *errors, same, verdict])
        elif "tool" in line and "summary" in line:
            rows.append([f"{line['tool']}: {line['summary']}", "", "", "", "" if line["passed"] else "WRONG"])
    return rows


def _times(lines: Sequence[Line]) -> Table:
    products, copied = _ceilings(lines)
    rows = [["milliseconds", "median", "of the floor"]]
    for line in lines:
        if line.get("status") == "timed" and "median_ms" in line:
            rate = products.get(line["dtype"])
            floor = 1e3 * floor_seconds(line["flop"], line["moved_bytes"], rate, copied) if rate and copied else 0.0
            share = f"{floor / line['median_ms']:.0%}" if floor else ""
            rows.append([line["part"], f"{line['median_ms']:.3g}", share])
    return rows


def _by_kernel(lines: Sequence[Line]) -> Table:
    rows = [["microseconds a step", "", "launches"]]
    for line in lines:
        if "kernels" in line:
            whole = {**line, "kernel": line["part"]}
            for one in (whole, *line["kernels"][:_MOST_KERNELS]):
                spent, launches = one["microseconds_a_step"], one["launches_a_step"]
                rows.append([one["kernel"][:80], f"{spent:.1f}", f"{launches:.1f}"])
    return rows


def _winners(lines: Sequence[Line]) -> Table:
    rows = [["fastest blocks", "", "microseconds", "before", "timed"]]
    for line in lines:
        if line.get("result") == "winner":
            tried = f"{line['candidates_timed']} of {line['candidates_compiled']}"
            took = [f"{line[name]:.1f}" for name in ("microseconds", "before_microseconds")]
            rows.append([line["part"], line["code"], *took, tried])
    return rows


def _counters(lines: Sequence[Line]) -> Table:
    rows = [["ncu", ""]]
    for line in lines:
        rows += [[f"{line['kernel'][:60]}: {name}", value] for name, value in line.get("metrics", {}).items()]
    return rows


def _failures(lines: Sequence[Line]) -> Table:
    rows = [["not measured"]]
    for line in lines:
        if line.get("result") == "stage" and line["status"] != "done":
            rows.append([f"{line['stage']}: {line['status']} after {line['seconds']:g} s of {line['limit_seconds']:g}"])
        elif line.get("status") in ("failed", "wrong") and "blocks" not in line:
            rows.append([f"{line['stage']}: {line['part']}: {line['status']}: {line['reason']}"[:240]])
    # A peer that is not installed is missing in every case: once is enough.
    reasons = dict.fromkeys(line["reason"][:120] for line in lines if line.get("status") == "unavailable")
    return [*rows, *([reason] for reason in reasons)]


def _ceilings(lines: Sequence[Line]) -> tuple[dict[str, float], float | None]:
    products = {line["dtype"]: line["flop_per_second"] for line in lines if "flop_per_second" in line}
    copied = _first(lines, part="copy")
    return products, None if copied is None else copied.get("bytes_per_second")


def _first(lines: Sequence[Line], part: str) -> Line | None:
    return next((line for line in lines if line.get("part") == part), None)


def _short(number: Any) -> str:
    return f"{number:.1e}" if isinstance(number, float) else str(number)
