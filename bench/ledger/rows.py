"""The rows of the ledger: what is launched, the time that it predicts, the floor of the work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypedDict

from cdt_fast.bench.ceilings import floor_seconds
from cdt_fast.bench.ledger.cards import LAUNCH_SECONDS, PROFILES, REDUNDANCY, Card
from cdt_fast.bench.ledger.recording import Entry, record
from cdt_fast.bench.ledger.works import Work
from cdt_fast.kernels.cards import GpuSpec


class Row(TypedDict):
    """A work on a card: kernels, bytes and executed FLOP; `share` is the floor over what is predicted."""

    card: str
    work: str
    tokens: int
    captured: bool
    launches: int
    bytes: int
    flop: float
    predicted_ms: float
    floor_ms: float
    share: float


def seconds(entry: Entry, card: Card) -> float:
    """What the launch takes on the card: the slower of its bytes and its products, while its last wave runs out."""
    computed = executed(entry, card) / card.rate(entry.dtype)
    return max(entry.traffic / card.copy_rate, computed) / card.occupied(entry.blocks, entry.warps if entry.flop else 0)


def executed(entry: Entry, card: Card) -> float:
    """Its FLOP, what several warps compute alike counted as often."""
    return entry.flop * REDUNDANCY.get((entry.name, card.spec.family), 1.0)


def predicted_seconds(entries: Sequence[Entry], card: Card, captured: bool) -> float:
    """The launches one after the other; where they are not captured, the host's time for them if that is longer."""
    device = sum(seconds(entry, card) for entry in entries)
    return device if captured else max(device, LAUNCH_SECONDS * len(entries))


def rows_of(work: Work) -> Iterator[Row]:
    """The work on every card, captured and launched."""
    for captured in (True, False):
        recorded: dict[GpuSpec, list[Entry]] = {}
        for name, card in PROFILES.items():
            entries = recorded.get(card.spec)
            if entries is None:
                entries = recorded[card.spec] = record(lambda captured=captured: work.prepare(captured), card.spec)
            predicted = predicted_seconds(entries, card, captured)
            floor = floor_seconds(work.flop, work.moved, card.product_rate, card.copy_rate)
            yield Row(
                card=name,
                work=work.name,
                tokens=work.tokens,
                captured=captured,
                launches=len(entries),
                bytes=sum(entry.traffic for entry in entries),
                flop=sum(executed(entry, card) for entry in entries),
                predicted_ms=1e3 * predicted,
                floor_ms=1e3 * floor,
                share=floor / predicted,
            )


def by_kernel(entries: Sequence[Entry], card: Card) -> list[tuple[str, int, float, float, float]]:
    """Name, launches, GB, GFLOP and milliseconds of each kernel, the slowest first."""
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        found[entry.name].append(entry)
    table = [
        (
            name,
            len(some),
            sum(entry.traffic for entry in some) / 1e9,
            sum(executed(entry, card) for entry in some) / 1e9,
            1e3 * sum(seconds(entry, card) for entry in some),
        )
        for name, some in found.items()
    ]
    return sorted(table, key=lambda line: -line[-1])
