"""What a run found: a short text for the terminal, and the table of the fastest blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdt_fast.bench.ceilings import floor_seconds
from cdt_fast.bench.triage.lines import Lines
from cdt_fast.files import write_text

Line = Mapping[str, Any]
_MOST_KERNELS = 12
_WIDE = 118


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
    """The lines of the text."""
    sections = (_machine, _checks, _times, _by_kernel, _winners, _counters, _failures)
    return [text for section in sections for text in section(lines)]


def _machine(lines: Sequence[Line]) -> Iterator[str]:
    versions = _first(lines, part="versions and limits")
    if versions:
        yield ""
        yield f"{versions['name']}: torch {versions['torch']}, Triton {versions['triton']}, source {versions['source']}"
    tables = _first(lines, part="block tables")
    if tables:
        yield tables["note"]
    launch = _first(lines, part="one launch")
    products, copied = _ceilings(lines)
    ceilings = [f"{dtype} products {rate / 1e12:.0f} TFLOP/s" for dtype, rate in products.items()]
    if copied:
        ceilings.append(f"copy {copied / 1e12:.2f} TB/s")
    if launch and "passed" in launch:
        ceilings.append(f"a launch keeps the host {launch['host_microseconds_a_call']:.0f} us")
    if ceilings:
        yield "; ".join(ceilings)


def _checks(lines: Sequence[Line]) -> Iterator[str]:
    checks = [line for line in lines if "relative_error_of_torch" in line]
    if checks:
        yield ""
        yield f"{'against float64: error, of torch, twice the same':<90}"
    for line in checks:
        verdict = "" if line["passed"] else "   WRONG"
        error, own = _short(line["relative_error"]), _short(line["relative_error_of_torch"])
        yield f"  {line['part'][:80]:<80} {error:>8} {own:>8} {'yes' if line['bitwise_repeat'] else 'NO':>4}{verdict}"
    for line in lines:
        if "tool" in line and "summary" in line:
            yield f"  {line['tool']}: {line['summary']}"


def _times(lines: Sequence[Line]) -> Iterator[str]:
    products, copied = _ceilings(lines)
    cases: dict[str, list[Line]] = {}
    for line in lines:
        if line.get("status") == "timed" and "median_ms" in line:
            cases.setdefault(line["case"], []).append(line)
    if cases:
        yield ""
        yield "milliseconds (share of the floor)"
    for case, ways in cases.items():
        yield f"  {case}"
        told = []
        for line in sorted(ways, key=lambda line: line["median_ms"]):
            share, rate = "", products.get(line["dtype"])
            if rate and copied and (line["flop"] or line["moved_bytes"]):
                floor = 1e3 * floor_seconds(line["flop"], line["moved_bytes"], rate, copied)
                share = f" ({100 * floor / line['median_ms']:.0f}%)"
            told.append(f"{line['way']} {line['median_ms']:.3g}{share}")
        yield from _wrapped(told)


def _by_kernel(lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        if "kernels" in line:
            yield ""
            total, count = line["microseconds_a_step"], line["launches_a_step"]
            yield f"{line['part'][:80]}: {total:.0f} us, {count:.0f} launches a step"
            for kernel in line["kernels"][:_MOST_KERNELS]:
                spent, launches = kernel["microseconds_a_step"], kernel["launches_a_step"]
                yield f"  {spent:9.1f} us  {launches:6.1f} x  {kernel['kernel'][:80]}"


def _winners(lines: Sequence[Line]) -> Iterator[str]:
    winners = [line for line in lines if line.get("result") == "winner"]
    if winners:
        yield ""
        yield "fastest blocks (microseconds, before)"
    for line in winners:
        tried = f"{line['candidates_timed']} of {line['candidates_compiled']}"
        took = f"{line['microseconds']:.1f} {line['before_microseconds']:.1f}"
        yield f"  {line['part']:<20} {line['code']}: {took}; {tried} timed"


def _counters(lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        if "metrics" in line:
            yield ""
            yield f"ncu: {line['kernel'][:80]}"
            yield from _wrapped([f"{name} {value}" for name, value in line["metrics"].items()])


def _failures(lines: Sequence[Line]) -> Iterator[str]:
    told = []
    for line in lines:
        if line.get("result") == "stage" and line["status"] != "done":
            told.append(f"  {line['stage']}: {line['status']} after {line['seconds']:g} s of {line['limit_seconds']:g}")
        elif line.get("status") in ("failed", "wrong") and "blocks" not in line:
            told.append(f"  {line['stage']}: {line['part']}: {line['status']}: {line['reason']}"[: 2 * _WIDE])
    # A peer that is not installed is missing in every case: once is enough.
    told += [f"  {reason}" for reason in dict.fromkeys(_reason(line) for line in lines) if reason]
    if told:
        yield ""
        yield "not measured"
        yield from told


def _reason(line: Line) -> str | None:
    return line["reason"][:_WIDE] if line.get("status") == "unavailable" else None


def _ceilings(lines: Sequence[Line]) -> tuple[dict[str, float], float | None]:
    products = {line["dtype"]: line["flop_per_second"] for line in lines if "flop_per_second" in line}
    copied = _first(lines, part="copy")
    return products, None if copied is None else copied.get("bytes_per_second")


def _first(lines: Sequence[Line], part: str) -> Line | None:
    return next((line for line in lines if line.get("part") == part), None)


def _short(number: Any) -> str:
    return f"{number:.1e}" if isinstance(number, float) else str(number)


def _wrapped(told: Sequence[str]) -> Iterator[str]:
    line = "   "
    for one in told:
        if len(line) + len(one) > _WIDE and line.strip():
            yield line
            line = "   "
        line += f" {one};"
    if line.strip():
        yield line.rstrip(";")
