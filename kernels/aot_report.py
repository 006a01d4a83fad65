"""What the ahead-of-time compilation found, as JSON for programs and as Markdown for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import triton

from cdt_fast.kernels.aot_case import PRECISIONS
from cdt_fast.kernels.aot_cases import FAMILIES
from cdt_fast.kernels.aot_compile import Configuration, Measurement
from cdt_fast.kernels.launch import CARDS

Measurements = Mapping[Configuration, Measurement]


@dataclass(frozen=True)
class Row:
    """One launch of one case on one card.

    Attributes:
        family, case, precision, card: their names.
        aligned: whether the case's sizes are multiples of sixteen.
        divisible: whether the code may rely on what sixteen divides.
        configuration: what is compiled for it.
    """

    family: str
    case: str
    precision: str
    card: str
    aligned: bool
    divisible: bool
    configuration: Configuration

    @property
    def spill_allowed(self) -> bool:
        """float32 tiles and odd sizes and addresses may be slow; what training runs on by default may not."""
        return not (self.aligned and self.divisible) or PRECISIONS[self.precision].dtype == torch.float32


class Ceiling(NamedTuple):
    """What a card can do at most: dense bfloat16 products summed in float32 (TFLOP/s), and its memory (GB/s)."""

    tera_flop: float
    giga_bytes: float

    def floor(self, flop: float, traffic: float) -> tuple[float, str]:
        """The microseconds below which it cannot be, and what holds it there."""
        compute, memory = flop / self.tera_flop * 1e-6, traffic / self.giga_bytes * 1e-3
        return (compute, "compute") if compute > memory else (memory, "memory")


# As NVIDIA publishes them: the white papers of GA102 (version 2), Ada and Blackwell RTX for the GeForce cards, the data
# sheet of the H200 (half of its figure with sparsity). An H200 was measured at 790 TFLOP/s and 4,300 GB/s.
CEILINGS = {
    "RTX 3090": Ceiling(71, 936),
    "RTX 4090": Ceiling(165, 1008),
    "RTX 5090": Ceiling(209, 1792),
    "H200": Ceiling(989, 4800),
}


def faults(rows: Iterable[Row], measurements: Measurements) -> list[str]:
    """Every fault, a line each, with what has it."""
    return [
        f"{row.family}, {row.case}, {row.precision}, {row.card}"
        f"{'' if row.divisible else ', any alignment'}: {row.configuration.kernel} {fault}"
        for row in rows
        for fault in measurements[row.configuration].faults(row.configuration.card, row.spill_allowed)
    ]


def as_json(rows: Iterable[Row], measurements: Measurements) -> str:
    """A list of objects, one a row, with everything that was measured."""
    return json.dumps([_record(row, measurements[row.configuration]) for row in rows], indent=1, default=str)


def _record(row: Row, measurement: Measurement) -> dict[str, object]:
    configuration = row.configuration
    return {
        "family": row.family,
        "case": row.case,
        "precision": row.precision,
        "card": row.card,
        "divisible": row.divisible,
        "kernel": configuration.kernel,
        "constants": configuration.named_constants,
        "warps": configuration.warps,
        "stages": configuration.stages,
        **asdict(measurement),
        "faults": measurement.faults(configuration.card, row.spill_allowed),
    }


def as_markdown(rows: Sequence[Row], measurements: Measurements, command: str) -> str:
    """The document: the command that made it, a summary, the floors, and a table a family."""
    families, cards = list(dict.fromkeys(row.family for row in rows)), list(dict.fromkeys(row.card for row in rows))
    broken = faults(rows, measurements)
    parts = [
        "# The kernels, compiled for every card",
        f"Made by `{command}` with Triton {triton.__version__}, without a GPU: do not edit. `make kernels-report` "
        "makes it for every card and dtype. "
        "The launchers are called with tensors that have a shape and no memory, and what they would launch is "
        "compiled for the card; the figures are read from the machine code. They say that a kernel fits, not how "
        "fast it is.",
        "## Summary",
        _summary(rows, measurements, cards),
        "A configuration is one kernel with one choice of types, flags and block shape. Shared memory is that of a "
        "block, in bytes; a spill is local memory, in bytes a thread. *Any alignment* is the same code for views whose "
        "address and strides sixteen need not divide: its loads are narrow and mostly not pipelined, and the only "
        "claim is that it compiles and fits.",
        "No faults." if not broken else "**Faults**\n\n" + "\n".join(f"- {line}" for line in broken),
        "## Floors",
        "The least time that the work can take in bfloat16, from published figures: sums and products over the dense "
        "rate of the tensor cores, bytes (every input once, every output once) over the memory's bandwidth, whichever "
        "is larger. *Intensity* is the ratio of the two, in FLOP a byte.",
        _floors(families),
    ]
    for family in families:
        parts += [f"## {family}", _table([row for row in rows if row.family == family], measurements, cards)]
    return "\n\n".join(parts) + "\n"


def _summary(rows: Sequence[Row], measurements: Measurements, cards: Sequence[str]) -> str:
    head = (
        "card",
        "",
        "configurations",
        "do not compile",
        "spill, 16 bits",
        "spill, float32",
        "most shared memory",
        "the card's",
    )
    lines = []
    for card in cards:
        for divisible in (True, False):
            here = {row.configuration: row for row in rows if row.card == card and row.divisible == divisible}
            if not here:
                continue
            found = [measurements[configuration] for configuration in here]
            lines.append(
                (
                    card,
                    "" if divisible else "any alignment",
                    str(len(here)),
                    str(sum(measurement.error is not None for measurement in found)),
                    _spills(here.values(), measurements, 2),
                    _spills(here.values(), measurements, 4),
                    f"{max(measurement.shared_bytes for measurement in found):,}",
                    f"{CARDS[card].shared_memory:,}",
                )
            )
    return _lines(head, lines)


def _spills(rows: Iterable[Row], measurements: Measurements, item_bytes: int) -> str:
    """How many configurations of numbers of that many bytes spill, and the most bytes."""
    spilled = [
        measurements[row.configuration].local_bytes
        for row in rows
        if PRECISIONS[row.precision].dtype.itemsize == item_bytes and measurements[row.configuration].local_bytes
    ]
    return f"{len(spilled)} (up to {max(spilled)} bytes)" if spilled else "0"


def _floors(families: Sequence[str]) -> str:
    head = ("work", "GFLOP", "MB", "intensity", *(f"{card}, µs" for card in CEILINGS))
    lines = []
    for family in families:
        for case in FAMILIES[family](torch.bfloat16):
            if case.flop is None:
                continue
            traffic = case.traffic(CARDS["RTX 3090"])
            floors = (ceiling.floor(case.flop, traffic) for ceiling in CEILINGS.values())
            lines.append(
                (
                    f"{family}: {case.name}",
                    f"{case.flop / 1e9:.1f}",
                    f"{traffic / 1e6:.1f}",
                    f"{case.flop / traffic:.0f}",
                    *(f"{microseconds:.0f} ({bound})" for microseconds, bound in floors),
                )
            )
    return _lines(head, lines)


def _table(rows: Sequence[Row], measurements: Measurements, cards: Sequence[str]) -> str:
    """A line a kernel and code: registers / shared memory in KiB / tensor-core instructions on each card."""
    codes: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        if row.divisible:
            # A launcher may launch one kernel twice: the later one would overwrite the earlier in its cell.
            cells = codes.setdefault((row.configuration.kernel, row.case, row.precision), {})
            cell = _cell(measurements[row.configuration])
            cells[row.card] = cell if cells.get(row.card, cell) == cell else f"{cells[row.card]}; {cell}"
    # float16 and bfloat16 mostly compile to the same: one line for both.
    merged: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (kernel, case, precision), cells in codes.items():
        merged.setdefault((kernel, case, tuple(cells.get(card, "–") for card in cards)), []).append(precision)
    lines = [
        (f"`{kernel}`", case, "; ".join(precisions), *cells) for (kernel, case, cells), precisions in merged.items()
    ]
    legend = "Registers / shared memory in KiB / tensor-core instructions; bold where registers spill."
    return f"{legend}\n\n{_lines(('kernel', 'case', 'numbers', *cards), lines)}"


def _cell(measurement: Measurement) -> str:
    if measurement.error is not None:
        return "**does not compile**"
    figures = (
        f"{measurement.registers} / {measurement.shared_bytes / 1024:.1f} / {measurement.tensor_core_instructions}"
    )
    return f"{figures} **({measurement.local_bytes} bytes spilled)**" if measurement.local_bytes else figures


def _lines(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))
