"""What the ahead-of-time compilation found: what it resumes from, CSV of every figure, Markdown for readers."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import triton

from cdt_fast.kernels.aot.case import PRECISIONS
from cdt_fast.kernels.aot.compile import Configuration, Measurement
from cdt_fast.kernels.cards import CARDS

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


COLUMNS = (
    *("family", "kernel", "case", "numbers", "card", "any alignment", "warps", "stages"),
    *("registers", "spilled bytes", "shared bytes", "tensor-core instructions", "redundancy", "fault"),
)


def faults(rows: Iterable[Row], measurements: Measurements) -> list[str]:
    """Every fault, a line each, with what has it."""
    return [
        f"{row.family}, {row.case}, {row.precision}, {row.card}"
        f"{'' if row.divisible else ', any alignment'}: {row.configuration.kernel} {fault}"
        for row in rows
        for fault in measurements[row.configuration].faults(row.configuration.card, row.spill_allowed)
    ]


def from_json(
    records: Mapping[str, Mapping[str, Any]], configurations: Iterable[Configuration]
) -> dict[Configuration, Measurement]:
    """What an earlier run wrote of these configurations, by their digests: neither their source nor Triton has changed
    since."""
    names = {field.name for field in fields(Measurement)}
    # An older program may have measured less.
    known = {digest: Measurement(**record) for digest, record in records.items() if record.keys() == names}
    digests = {configuration: configuration.digest for configuration in configurations} if known else {}
    return {configuration: known[digest] for configuration, digest in digests.items() if digest in known}


def as_csv(rows: Iterable[Row], measurements: Measurements) -> str:
    """A line a row: what it is, and the figures that readers look for."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        configuration, measured = row.configuration, measurements[row.configuration]
        names = (row.family, configuration.kernel, row.case, row.precision, row.card, "" if row.divisible else "yes")
        figures = (
            measured.registers, measured.local_bytes, measured.shared_bytes, measured.tensor_core_instructions,
            f"{measured.redundancy:.3g}",
        )  # fmt: skip
        fault = "; ".join(measured.faults(configuration.card, row.spill_allowed))
        writer.writerow((*names, configuration.warps, configuration.stages, *figures, fault))
    return file.getvalue()


def as_markdown(rows: Sequence[Row], measurements: Measurements, command: str) -> str:
    """The document: the command that made it, a summary, a table a family."""
    families, cards = list(dict.fromkeys(row.family for row in rows)), list(dict.fromkeys(row.card for row in rows))
    broken = faults(rows, measurements)
    parts = [
        "# The kernels, compiled for every card",
        f"Made by `{command}` with Triton {triton.__version__}, without a GPU: do not edit. `make kernels-report` "
        "makes it, and `build/kernels.csv` with a line a configuration. An RTX 4090 takes the blocks of an RTX 3090, a "
        "B300 those of a B200; those two and the RTX 5090 are compiled in bfloat16 alone. "
        "The launchers are called with tensors that have a shape and no memory, and what they would launch is "
        "compiled for the card; the figures are read from the machine code. They say that a kernel fits, not how "
        "fast it is.",
        "## Summary",
        _summary(rows, measurements, cards),
        "A configuration is one kernel with one choice of types, flags and block shape. Shared memory is that of a "
        "block, in bytes; a spill is local memory, in bytes a thread. Odd sizes are those that sixteen does not "
        "divide: their loads are narrow, and they may spill, as float32 may. *Any alignment* is the same code for "
        "views whose address and strides sixteen need not divide: its loads are narrow and mostly not pipelined, and "
        "the only claim is that it compiles and fits.",
        "No faults." if not broken else "**Faults**\n\n" + "\n".join(f"- {line}" for line in broken),
        "## Kernels",
        "The worst of all cases of a kernel whose sizes sixteen divides: most registers of a thread / most shared "
        "memory of a block in KiB / tensor-core instructions in the code, the fewest and the most; ×, where several "
        "warps compute the same products: what is computed over what is needed, at most; *one by one* where `ptxas` "
        "has each wgmma wait for the one before; bold where registers spill.",
    ]
    for family in families:
        parts += [f"### {family}", _table([row for row in rows if row.family == family], measurements, cards)]
    return "\n\n".join(parts) + "\n"


def _summary(rows: Sequence[Row], measurements: Measurements, cards: Sequence[str]) -> str:
    head = (
        "card",
        "",
        "configurations",
        "do not compile",
        "spill, 16 bits",
        "spill, 16 bits, odd sizes",
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
            measured = [measurements[configuration] for configuration in here]
            lines.append(
                (
                    card,
                    "" if divisible else "any alignment",
                    str(len(here)),
                    str(sum(measurement.error is not None for measurement in measured)),
                    _spills(here.values(), measurements, 2, True),
                    _spills(here.values(), measurements, 2, False),
                    _spills(here.values(), measurements, 4),
                    f"{max(measurement.shared_bytes for measurement in measured):,}",
                    f"{CARDS[card].shared_memory:,}",
                )
            )
    return _lines(head, lines)


def _spills(rows: Iterable[Row], measurements: Measurements, item_bytes: int, aligned: bool | None = None) -> str:
    """How many configurations of numbers of that many bytes, aligned or not or all, spill, and the most bytes."""
    spilled = [
        measurements[row.configuration].local_bytes
        for row in rows
        if PRECISIONS[row.precision].dtype.itemsize == item_bytes
        and aligned in (None, row.aligned)
        and measurements[row.configuration].local_bytes
    ]
    return f"{len(spilled)} (up to {max(spilled)} bytes)" if spilled else "0"


def _table(rows: Sequence[Row], measurements: Measurements, cards: Sequence[str]) -> str:
    """A line a kernel and its numbers, with the worst of its cases on each card."""
    kernels: dict[tuple[str, str], dict[str, list[Measurement]]] = {}
    for row in rows:
        if row.divisible and row.aligned:
            of_cards = kernels.setdefault((row.configuration.kernel, row.precision), {})
            of_cards.setdefault(row.card, []).append(measurements[row.configuration])
    lines = [
        (f"`{kernel}`", precision, *(_worst(of_cards.get(card, [])) for card in cards))
        for (kernel, precision), of_cards in kernels.items()
    ]
    return _lines(("kernel", "numbers", *cards), lines)


def _worst(measured: Sequence[Measurement]) -> str:
    if not measured:
        return "–"
    failed = sum(measurement.error is not None for measurement in measured)
    if failed:
        return f"**{failed} of {len(measured)} do not compile**"
    instructions = sorted({measurement.tensor_core_instructions for measurement in measured})
    shared = max(measurement.shared_bytes for measurement in measured) / 1024
    figures = f"{max(measurement.registers for measurement in measured)} / {shared:.1f} / {instructions[0]}"
    if len(instructions) > 1:
        figures += f"–{instructions[-1]}"
    redundancy = max(measurement.redundancy for measurement in measured)
    if redundancy > 1:
        figures += f" ×{redundancy:.3g}"
    if any(measurement.serialized for measurement in measured):
        figures += " one by one"
    spilled = max(measurement.local_bytes for measurement in measured)
    return f"{figures} **({spilled} bytes spilled)**" if spilled else figures


def _lines(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))
