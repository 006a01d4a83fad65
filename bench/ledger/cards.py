"""What the cards reach, and how many blocks they hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
