"""The rows of the ledger: what is launched, what the cards reach, the time that it predicts, the floor of the work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cdt_fast.bench.ceilings import floor_seconds
from cdt_fast.bench.ledger.recording import Entry, record
from cdt_fast.bench.ledger.works import Work
from cdt_fast.kernels.cards import CARDS, GpuSpec


@dataclass(frozen=True)
class Card:
    """A GPU as the ledger knows it.

    Attributes:
        spec: what the block tables and the grids ask for.
        product_rate: FLOP/s of a large product of 16-bit factors with float32 sums.
        float32_rate: FLOP/s of products of float32, without TF32.
        copy_rate: bytes/s that a large copy reads and writes.
    """

    spec: GpuSpec
    product_rate: float
    float32_rate: float
    copy_rate: float

    def rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of a product of factors of this dtype."""
        return self.product_rate if dtype.itemsize == 2 else self.float32_rate

    def occupied(self, blocks: int, warps: int) -> float:
        """The share of the card that works on average while so many blocks run: the last of the waves is not full.

        Blocks that multiply are taken to fill the registers: eight warps a multiprocessor. What only copies (0 warps)
        keeps the memory busy as long as every multiprocessor has a block. A library's grid (0 blocks) fills the card.
        """
        if not blocks or not warps:
            return min(1.0, blocks / self.spec.processors) or 1.0
        together = self.spec.processors * max(1, 8 // warps)
        return blocks / (-(-blocks // together) * together)


# H100 and H200: measured. The others: data sheets (GA102 v2, Ada, Blackwell RTX, A100 80 GB), 97 % of the products and
# 92 % of the bandwidth, which is what the measured ones reach at best.
PROFILES = {
    "RTX 3090": Card(CARDS["RTX 3090"], 69e12, 34e12, 0.86e12),
    "RTX 4090": Card(CARDS["RTX 4090"], 160e12, 80e12, 0.93e12),
    "RTX 5090": Card(CARDS["RTX 5090"], 203e12, 100e12, 1.65e12),
    "A100": Card(CARDS["A100"], 302e12, 19e12, 1.88e12),
    "H100": Card(CARDS["H200"], 798e12, 65e12, 3.0e12),
    "H200": Card(CARDS["H200"], 790e12, 65e12, 4.3e12),
}

# Seconds of the host for one launch through torch's dispatcher, autograd and Triton's launcher (170 of them take 3 to
# 3.5 ms); a step that was captured is one launch.
LAUNCH_SECONDS = 20e-6

# Of the products on the tensor cores, what the compiler makes the warps compute over what is needed, by kernel and
# family (`kernels.aot.compile.measure` of the launches of the ledger). The others compute nothing twice.
REDUNDANCY = {
    ("unrolled_backward_kernel", "ampere"): 1.08,
    ("unrolled_backward_kernel", "consumer"): 1.08,
}


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


def rows_of(work: Work) -> Iterator[dict[str, Any]]:
    """The work on every card, captured and launched: bytes and executed FLOP of its launches, the time that they
    predict, and `share`, the floor over that."""
    for captured in (True, False):
        recorded: dict[GpuSpec, list[Entry]] = {}
        for name, card in PROFILES.items():
            entries = recorded.get(card.spec)
            if entries is None:
                entries = recorded[card.spec] = record(lambda captured=captured: work.prepare(captured), card.spec)
            predicted = predicted_seconds(entries, card, captured)
            floor = floor_seconds(work.flop, work.moved, card.product_rate, card.copy_rate)
            yield {
                "card": name,
                "work": work.name,
                "tokens": work.tokens,
                "captured": captured,
                "launches": len(entries),
                "bytes": sum(entry.traffic for entry in entries),
                "flop": sum(executed(entry, card) for entry in entries),
                "predicted_ms": 1e3 * predicted,
                "floor_ms": 1e3 * floor,
                "share": floor / predicted,
            }
