"""What the ahead-of-time compilation found: what it resumes from, CSV of every figure, Markdown for readers."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import triton

from cdt_fast import tables
from cdt_fast.kernels.aot.case import PRECISIONS
from cdt_fast.kernels.aot.compile import Configuration, Measurement
from cdt_fast.kernels.cards import CARDS


@dataclass(frozen=True)
class Row:
    """One launch of one case on one card.

    Attributes:
        family, case, precision, card: their names.
        aligned: whether the case's sizes are multiples of sixteen.
        divisible: whether the code may rely on what sixteen divides.
        configuration: what is compiled for it.
        measured: what came out.
    """

    family: str
    case: str
    precision: str
    card: str
    aligned: bool
    divisible: bool
    configuration: Configuration
    measured: Measurement = Measurement()

    @property
    def spill_allowed(self) -> bool:
        """float32 tiles and odd sizes and addresses may be slow; what training runs on by default may not."""
        return not (self.aligned and self.divisible) or PRECISIONS[self.precision].dtype == torch.float32

    @property
    def faults(self) -> list[str]:
        """What is wrong with it, a line each."""
        return self.measured.faults(self.configuration.card, self.spill_allowed)


def faults(rows: Iterable[Row]) -> list[str]:
    """Every fault, a line each, with what has it."""
    return [
        f"{row.family}, {row.case}, {row.precision}, {row.card}"
        f"{'' if row.divisible else ', any alignment'}: {row.configuration.kernel} {fault}"
        for row in rows
        for fault in row.faults
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


def as_csv(rows: Sequence[Row]) -> str:
    """A line a row: what it is, and the figures that readers look for."""
    lines = [
        {
            "family": row.family,
            "kernel": row.configuration.kernel,
            "case": row.case,
            "numbers": row.precision,
            "card": row.card,
            "any alignment": "" if row.divisible else "yes",
            "warps": row.configuration.warps,
            "stages": row.configuration.stages,
            "registers": row.measured.registers,
            "spilled bytes": row.measured.local_bytes,
            "shared bytes": row.measured.shared_bytes,
            "tensor-core instructions": row.measured.tensor_core_instructions,
            "redundancy": f"{row.measured.redundancy:.3g}",
            "fault": "; ".join(row.faults),
        }
        for row in rows
    ]
    file = io.StringIO()
    writer = csv.DictWriter(file, lines[0] if lines else (), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def as_markdown(rows: Sequence[Row], command: str) -> str:
    """The document: the command that made it, a summary, a table a family."""
    families, cards = list(dict.fromkeys(row.family for row in rows)), list(dict.fromkeys(row.card for row in rows))
    broken = faults(rows)
    parts = [
        "# The kernels, compiled for every card",
        f"Made by `{command}` with Triton {triton.__version__}, without a GPU: do not edit. `make kernels-report` "
        "makes it, and `build/kernels.csv` with a line a configuration. An RTX 4090 takes the blocks of an RTX 3090, a "
        "B300 those of a B200; those two and the RTX 5090 are compiled in bfloat16 alone. "
        "The launchers are called with tensors that have a shape and no memory, and what they would launch is "
        "compiled for the card; the figures are read from the machine code. They say that a kernel fits, not how "
        "fast it is.",
        "## Summary",
        _summary(rows, cards),
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
        parts += [f"### {family}", _table([row for row in rows if row.family == family], cards)]
    return "\n\n".join(parts) + "\n"


def _summary(rows: Sequence[Row], cards: Sequence[str]) -> str:
    lines: list[dict[str, str]] = []
    for card, divisible in itertools.product(cards, (True, False)):
        # One of each configuration.
        here = {row.configuration: row for row in rows if row.card == card and row.divisible == divisible}.values()
        if here:
            line = {
                "card": card,
                "": "" if divisible else "any alignment",
                "configurations": str(len(here)),
                "do not compile": str(sum(row.measured.error is not None for row in here)),
                "spill, 16 bits": _spills(row for row in here if row.aligned and _bytes(row) == 2),
                "spill, 16 bits, odd sizes": _spills(row for row in here if not row.aligned and _bytes(row) == 2),
                "spill, float32": _spills(row for row in here if _bytes(row) == 4),
                "most shared memory": f"{max(row.measured.shared_bytes for row in here):,}",
                "the card's": f"{CARDS[card].shared_memory:,}",
            }
            lines.append(line)
    return tables.as_markdown([[*lines[0]], *([*line.values()] for line in lines)]) if lines else ""


def _bytes(row: Row) -> int:
    return PRECISIONS[row.precision].dtype.itemsize


def _spills(rows: Iterable[Row]) -> str:
    """How many spill, and the most bytes."""
    spilled = [row.measured.local_bytes for row in rows if row.measured.local_bytes]
    return f"{len(spilled)} (up to {max(spilled)} bytes)" if spilled else "0"


def _table(rows: Sequence[Row], cards: Sequence[str]) -> str:
    """A line a kernel and its numbers, with the worst of its cases on each card."""
    kernels: dict[tuple[str, str], dict[str, list[Measurement]]] = {}
    for row in rows:
        if row.divisible and row.aligned:
            of_cards = kernels.setdefault((row.configuration.kernel, row.precision), {})
            of_cards.setdefault(row.card, []).append(row.measured)
    lines = [["kernel", "numbers", *cards]]
    for (kernel, precision), of_cards in kernels.items():
        lines.append([f"`{kernel}`", precision, *(_worst(of_cards.get(card, [])) for card in cards)])
    return tables.as_markdown(lines)


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
