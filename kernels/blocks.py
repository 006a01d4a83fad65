"""The shapes of the kernels' blocks: one type, and all tables, by the family of the card and by `math_mode`.

A row is chosen so that it fits the shared memory of its family, does not spill registers, and that no two warps compute
the same products: the compiler says so without a GPU. `python -m cdt_fast.kernels.aot` counts it again.

On tensor cores the compiler gives each warp sixteen rows and all columns of a product where its tile is no wider than
high, else all rows and at least eight columns: where a tile has fewer than its warps cover, several compute the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from cdt_fast.kernels.cards import card_of, math_mode

FAMILIES = ("consumer", "ampere", "hopper", "blackwell")
MODES = ("16 bits", "tf32", "ieee")
ANY_SIZE = 2**62
# The most tokens of a sequence that a tile holds whole.
LONGEST = 64
# The widest tokens that a block holds whole: of wider ones the registers do not.
WIDEST = 256


class Blocks(NamedTuple):
    """The shape of one block of a kernel. A size that the kernel does not have is 0."""

    rows: int = 0  # of the tile that the block computes: tokens
    columns: int = 0  # of it that are computed, or read, at a time
    keys: int = 0  # tokens that are streamed at a time
    atoms: int = 0  # columns of the dictionary that are taken at a time
    depth: int = 0  # terms of a product that are taken at a time
    warps: int = 4
    stages: int = 1  # of the software pipeline


# The sizes of a block, or of several by the largest size that each is for.
Choice = tuple[int, ...] | Mapping[int, tuple[int, ...]]


class BlockTable:
    """The blocks of one kernel.

    Args:
        sizes: the sizes of `Blocks` that the numbers of a row are, in their order.
        rows: by a family, or by a family and a `math_mode`. What the compute capabilities of "blackwell" do not have of
            their own they take from "hopper".
    """

    def __init__(self, sizes: str, rows: Mapping[str | tuple[str, str], Choice]) -> None:
        self._sizes, self._rows = sizes, dict(rows)
        self._choices: dict[tuple[str, str], tuple[tuple[int, Blocks], ...]] = {
            (family, mode): self._find(family, mode) for family, mode in itertools.product(FAMILIES, MODES)
        }

    def _find(self, family: str, mode: str) -> tuple[tuple[int, Blocks], ...]:
        keys = ((family, mode), family) + ((("hopper", mode), "hopper") if family == "blackwell" else ())
        choice = next((self._rows[key] for key in keys if key in self._rows), {})
        rows = choice if isinstance(choice, Mapping) else {ANY_SIZE: choice}
        names = self._sizes.split()
        return tuple((largest, Blocks(**dict(zip(names, row, strict=True)))) for largest, row in sorted(rows.items()))

    def changed(self, rows: Mapping[str | tuple[str, str], Choice]) -> BlockTable:
        """The same table with other rows in places."""
        return BlockTable(self._sizes, {**self._rows, **rows})

    def choices(self, family: str, mode: str) -> tuple[tuple[int, Blocks], ...]:
        """The largest size that they are for, and the blocks, from the smallest size on."""
        return self._choices[family, mode]

    def blocks(self, tensor: Tensor, size: int = 0) -> Blocks:
        """What the kernel takes for tensors like `tensor`, on the card that it is on.

        Raises:
            ValueError: no row holds `size`.
        """
        choices = self._choices[card_of(tensor).family, math_mode(tensor.dtype)]
        for largest, blocks in choices:
            if size <= largest:
                return blocks
        raise ValueError(f"a block holds up to {choices[-1][0] if choices else 0}, got {size}")


# float32 tiles are smaller: twice the bytes, and IEEE products use registers where tensor cores use none.
RESIDUAL_LINEAR = BlockTable(
    "rows columns depth warps stages",
    {
        ("consumer", "16 bits"): (128, 128, 32, 8, 3),
        ("ampere", "16 bits"): (128, 128, 32, 8, 4),
        ("hopper", "16 bits"): (128, 128, 64, 8, 4),
        ("consumer", "tf32"): (128, 64, 32, 8, 3),
        ("ampere", "tf32"): (128, 128, 32, 8, 3),
        ("hopper", "tf32"): (128, 128, 32, 8, 3),
        ("consumer", "ieee"): (64, 64, 32, 4, 2),
        ("ampere", "ieee"): (64, 64, 32, 4, 3),
        ("hopper", "ieee"): (64, 64, 32, 4, 3),
    },
)

# For both directions and every width. In 16 bits none of them spills; 128 rows do, on sm_90 too. With 16 or 32 float32
# rows and one stage, IEEE products spill more than 1 KB.
LISTA_STEP = BlockTable(
    "rows atoms warps stages",
    {
        ("consumer", "16 bits"): (64, 32, 8, 3),
        ("ampere", "16 bits"): (64, 32, 8, 4),
        ("hopper", "16 bits"): (64, 64, 8, 3),
        ("consumer", "tf32"): (32, 32, 8, 2),
        ("ampere", "tf32"): (32, 32, 8, 2),
        ("hopper", "tf32"): (32, 32, 8, 2),
        ("consumer", "ieee"): (32, 16, 8, 2),
        ("ampere", "ieee"): (32, 32, 8, 2),
        ("hopper", "ieee"): (32, 32, 8, 2),
    },
)

# By the tokens of a sequence: the forward, and the gradient of the values alone. With four warps 16-bit tiles of 64
# rows spill, with eight they do not. 128 rows spill on consumer cards, and IEEE float32 does at 64 rows: longer
# sequences are for the streaming kernels. Without wgmma 32 columns at a time spill 8 to 16 bytes here, and 16 columns
# do with dz.
SYMMETRIC_ATTENTION_PACKED = BlockTable(
    "rows columns warps stages",
    {
        ("consumer", "16 bits"): {64: (64, 16, 8, 2)},
        ("consumer", "tf32"): {32: (32, 64, 4, 2), 64: (64, 16, 4, 2)},
        ("consumer", "ieee"): {32: (32, 32, 4, 2), 64: (64, 32, 16, 2)},
        ("ampere", "16 bits"): {64: (64, 16, 8, 2)},
        ("ampere", "tf32"): {32: (32, 64, 4, 2), 64: (64, 16, 4, 2)},
        ("ampere", "ieee"): {32: (32, 32, 4, 3), 64: (64, 32, 16, 2)},
        ("hopper", "16 bits"): {64: (64, 64, 8, 3)},
        ("hopper", "tf32"): {32: (32, 64, 4, 2), 64: (64, 32, 4, 2)},
        ("hopper", "ieee"): {32: (32, 32, 4, 3), 64: (64, 32, 16, 2)},
    },
)

SYMMETRIC_ATTENTION_PACKED_BACKWARD = SYMMETRIC_ATTENTION_PACKED.changed(
    {("consumer", "16 bits"): {64: (64, 32, 8, 3)}, ("ampere", "16 bits"): {64: (64, 32, 8, 2)}}
)

# By the greater width, of z or of the values. No two warps compute the same products, but where what avoids it spills
# or does not fit: 256 columns.
SYMMETRIC_ATTENTION_STREAMING = BlockTable(
    "rows keys warps stages",
    {
        ("consumer", "16 bits"): {128: (128, 64, 8, 2), 256: (64, 64, 8, 1)},
        ("consumer", "tf32"): {64: (64, 32, 4, 2), 256: (32, 32, 4, 1)},
        ("consumer", "ieee"): {64: (64, 32, 8, 2), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
        ("ampere", "16 bits"): {128: (128, 64, 8, 3), 256: (64, 64, 8, 2)},
        ("ampere", "tf32"): {128: (64, 32, 4, 2), 256: (32, 64, 8, 1)},
        ("ampere", "ieee"): {64: (64, 32, 8, 2), 128: (32, 32, 8, 2), 256: (32, 16, 8, 1)},
        ("hopper", "16 bits"): {128: (128, 64, 8, 3), 256: (64, 64, 8, 2)},
        ("hopper", "tf32"): {128: (64, 32, 4, 2), 256: (64, 32, 8, 2)},
        ("hopper", "ieee"): {64: (64, 32, 8, 2), 128: (32, 32, 8, 1), 256: (32, 16, 8, 2)},
    },
)

# At width 256 a single stage makes the consumer cards spill; two take 100,736 bytes of their 101,376. On Hopper eight
# warps with 64 rows of 128 columns compute twice, and one wgmma after the other; 128 rows spill there (56 bytes) where
# values of their own, `energy` and lengths meet.
SYMMETRIC_ATTENTION_STREAMING_BACKWARD = BlockTable(
    "rows keys warps stages",
    {
        ("consumer", "16 bits"): {64: (64, 16, 4, 1), 128: (32, 32, 4, 2), 256: (32, 32, 8, 2)},
        ("consumer", "tf32"): {64: (32, 64, 8, 1), 128: (16, 32, 4, 1), 256: (16, 16, 4, 1)},
        ("consumer", "ieee"): {64: (32, 16, 8, 1), 256: (16, 16, 8, 1)},
        ("ampere", "16 bits"): {64: (64, 32, 4, 3), 128: (64, 64, 8, 2), 256: (32, 64, 8, 1)},
        ("ampere", "tf32"): {128: (32, 64, 8, 1), 256: (16, 32, 8, 1)},
        ("ampere", "ieee"): {64: (32, 16, 8, 2), 128: (16, 16, 8, 1), 256: (16, 16, 8, 2)},
        ("hopper", "16 bits"): {64: (128, 64, 8, 2), 128: (128, 32, 8, 2), 256: (32, 64, 8, 2)},
        ("hopper", "tf32"): {64: (64, 32, 4, 1), 128: (32, 64, 8, 1), 256: (32, 32, 8, 1)},
        ("hopper", "ieee"): {64: (32, 16, 8, 2), 256: (16, 16, 8, 2)},
    },
)

# For elements of 2 bytes, by the greater width, of the signal or of the next projection. Tiles of 128 rows spill, and
# tiles of float32 leave no shared memory for the dictionary: float32 is for torch's own products. Of eight warps'
# products with wide signals Hopper computes half twice.
UNROLLED_LAYER = BlockTable(
    "rows atoms columns warps stages",
    {
        "consumer": {128: (64, 32, 32, 4, 2), 256: (64, 32, 64, 8, 2)},
        "ampere": {64: (64, 64, 32, 4, 2), 256: (64, 64, 64, 8, 2)},
        "hopper": {64: (64, 64, 32, 4, 3), 256: (64, 64, 32, 8, 2)},
    },
)
# With one dictionary, without lengths and with aligned rows there is room for more atoms, and on Hopper two blocks of
# four warps share a multiprocessor.
UNROLLED_LAYER_LEAN = UNROLLED_LAYER.changed(
    {
        "consumer": {128: (64, 32, 32, 4, 2), 256: (64, 64, 32, 8, 2)},
        "hopper": {64: (64, 64, 32, 4, 3), 256: (64, 32, 64, 4, 3)},
        "blackwell": {64: (64, 64, 32, 4, 3), 256: (64, 64, 32, 8, 2)},
    }
)
UNROLLED_LAYER_BACKWARD = BlockTable(
    "rows atoms columns warps stages",
    {
        "consumer": (64, 32, 32, 8, 2),
        "ampere": (64, 64, 32, 8, 2),
        "hopper": (64, 64, 32, 8, 2),
        # A second stage spills 200 bytes with lengths, or 8 with sixteen warps.
        "blackwell": (64, 64, 64, 8, 1),
    },
)
UNROLLED_LAYER_BACKWARD_LEAN = UNROLLED_LAYER_BACKWARD.changed(
    {"consumer": (64, 64, 32, 8, 2), "hopper": (64, 32, 32, 4, 3), "blackwell": (64, 64, 32, 8, 2)}
)

# Columns of a row that are read together, by the vocabulary. Whole rows live in the L2 cache between the two reads,
# whatever the block; the width only hides latency. The gradient of smoothed and capped logits keeps the most values
# alive: wider blocks than these spill.
_OF_ONE_ROW = {
    **{columns: (columns, max(1, columns // 512), 2) for columns in (128, 256, 512, 1024, 2048)},
    ANY_SIZE: (4096, 8, 2),
}
LAYERWISE_CROSS_ENTROPY = BlockTable(
    "columns warps stages", dict.fromkeys(("consumer", "ampere", "hopper"), _OF_ONE_ROW)
)
# Elements of one depth: 16 bytes a thread and load in bfloat16; a card with more bandwidth to fill takes more warps.
LAYERWISE_RECONSTRUCTION_LOSS = BlockTable(
    "columns warps stages",
    {
        "consumer": (1024, 4, 2),
        "ampere": (2048, 8, 2),
        "hopper": (2048, 8, 2),
    },
)
