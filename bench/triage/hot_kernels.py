"""The kernels whose blocks are swept: what they are timed on, and which blocks are tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cdt_fast.kernels import layerwise_cross_entropy as entropy
from cdt_fast.kernels import symmetric_attention_streaming as streaming
from cdt_fast.kernels import unrolled_layer as unrolled
from cdt_fast.kernels.launch import GpuSpec, Launch, recording

Inputs = dict[str, Tensor]
_MOST_CANDIDATES = {"toy": 2, "gpu": 48}
_TOY = {
    "sequences": 3, "tokens": 5, "width": 16, "atoms": 64, "rows": 8, "vocabulary": 100,
    "heads": 2, "length": 40, "head_width": 16,
}  # fmt: skip
_GPU = {
    "sequences": 3200, "tokens": 20, "width": 256, "atoms": 1024, "rows": 1024, "vocabulary": 128256,
    "heads": 64, "length": 1024, "head_width": 128,
}  # fmt: skip


@dataclass(frozen=True)
class Hot:
    """A kernel of which a table of blocks has one row for the shape at hand.

    Attributes:
        name: of the launcher.
        function: of the kernel.
        table: module and name of the table.
        row: what chooses its row, beside the card and the numbers.
        blocks: the type of a row.
        choices: what is tried of each of its fields.
        make: `(device, sizes)` → the tensors that are read.
        apply: `(tensors, blocks)` calls the launcher; None: the blocks of its table.
        overwritten: the tensor that the kernel reads and then writes over.
    """

    name: str
    function: str
    table: str
    row: str
    blocks: Any
    choices: Mapping[str, Sequence[int]]
    make: Callable[[torch.device, Mapping[str, int]], Inputs]
    apply: Callable[[Inputs, Any], object]
    overwritten: str | None = None

    def inputs(self, device: torch.device, size: str) -> Inputs:
        """The tensors that are read, on this device."""
        return self.make(device, _TOY if size == "toy" else _GPU)

    def launch(self, inputs: Inputs, card: GpuSpec, blocks: Mapping[str, int] | None) -> Launch:
        """The launch that the launcher would make on the card; its outputs hold whatever their memory held."""
        with recording(card) as launches:
            self.apply(inputs, None if blocks is None else self.blocks(**blocks))
        return next(launch for launch in launches if launch.kernel.__name__ == self.function)

    def described(self, card: GpuSpec, size: str, blocks: Mapping[str, int] | None) -> Launch:
        """The same on tensors without memory."""
        with recording(card):
            inputs = self.inputs(torch.device("meta"), size)
        return self.launch(inputs, card, blocks)

    def default(self, card: GpuSpec, size: str) -> dict[str, int]:
        """The row that the table has for this shape, read off the launch."""
        launch = self.described(card, size, None)
        known = {"warps": launch.warps, "stages": launch.stages, "columns": launch.constants.get("BLOCK")}
        given = {field: launch.constants.get(field.upper(), known.get(field)) for field in self.blocks._fields}
        return {field: 0 if value is None else int(value) for field, value in given.items()}

    def candidates(self, card: GpuSpec, size: str) -> list[dict[str, int]]:
        """The default first, then what differs from it in one field, in two, and so on."""
        default = self.default(card, size)
        fields = [field for field in self.blocks._fields if field in self.choices]
        every = [
            {**default, **dict(zip(fields, values, strict=True))}
            for values in itertools.product(*(self.choices[field] for field in fields))
        ]
        every.sort(key=lambda blocks: sum(blocks[field] != default[field] for field in fields))
        return [default, *(blocks for blocks in every if blocks != default)][: _MOST_CANDIDATES[size]]


def _random(device: torch.device, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=device).mul_(scale).bfloat16()


def _layer(device: torch.device, sizes: Mapping[str, int]) -> Inputs:
    """As a layer in the middle of a network has them; half of the codes are zero."""
    batch = (sizes["sequences"], sizes["tokens"])
    width, atoms = sizes["width"], sizes["atoms"]
    return {
        "codes": _random(device, *batch, atoms, scale=0.1).relu(),
        "signal": _random(device, *batch, width),
        "projection": _random(device, *batch, width, scale=0.1),
        "dictionary": _random(device, width, atoms, scale=0.05),
        "target": _random(device, *batch, width),
        "grad_codes": _random(device, *batch, atoms),
        "grad_projection": _random(device, *batch, width),
        "grad_error": torch.ones((), device=device),
    }


def _forward(x: Inputs, blocks: Any) -> object:
    return unrolled.unrolled_forward(
        x["codes"], x["signal"], x["projection"], x["dictionary"], None, x["target"], None,
        0.1, 0.01, 1.0, "soft_threshold", blocks,
    )  # fmt: skip


def _update(x: Inputs, blocks: Any) -> object:
    return unrolled.unrolled_update(
        x["dictionary"], x["target"], None, x["codes"], x["projection"], x["grad_codes"], x["grad_projection"],
        x["grad_error"], "soft_threshold", blocks,
    )  # fmt: skip


def _backward(x: Inputs, blocks: Any) -> object:
    return unrolled.unrolled_backward(
        x["codes"], x["signal"], x["projection"], x["dictionary"], None, x["target"], None, x["codes"],
        x["projection"], x["grad_codes"], x["grad_projection"], x["grad_error"], 0.1, 1.0, "soft_threshold",
        blocks=blocks,
    )  # fmt: skip


def _logits(device: torch.device, sizes: Mapping[str, int]) -> Inputs:
    rows, vocabulary = sizes["rows"], sizes["vocabulary"]
    return {
        "logits": _random(device, rows, vocabulary, scale=2.0),
        "targets": torch.randint(vocabulary, (rows,), device=device),
        **{name: torch.rand(rows, device=device) for name in ("losses", "log_sums", "scales")},
    }


def _entropy(x: Inputs, blocks: Any) -> object:
    return entropy.cross_entropy_(**x, ignore_index=-100, softcap=None, smoothing=0.0, blocks=blocks)  # type: ignore[arg-type]


def _tokens(device: torch.device, sizes: Mapping[str, int]) -> Inputs:
    z = _random(device, sizes["heads"], sizes["length"], sizes["head_width"], scale=0.2)
    output, log_sums = streaming.streaming_forward(z, None, None, 1.0, False)
    return {"z": z, "output": output, "log_sums": log_sums, "grad_output": _random(device, *z.shape)}


def _attend(x: Inputs, blocks: Any) -> object:
    return streaming.streaming_forward(x["z"], None, None, 1.0, False, blocks)


def _attend_backward(x: Inputs, blocks: Any) -> object:
    return streaming.streaming_backward(
        x["z"], None, x["output"], x["log_sums"], x["grad_output"], None, 1.0, False, blocks=blocks
    )


_LAYER = {"rows": (32, 64, 128), "atoms": (32, 64, 128), "columns": (32, 64), "warps": (4, 8), "stages": (2, 3, 4)}
_TILES = {"rows": (32, 64, 128), "keys": (16, 32, 64, 128), "warps": (4, 8), "stages": (1, 2, 3)}
HOT = (
    Hot(
        "unrolled_forward", "unrolled_forward_kernel", "unrolled_layer.FORWARD_BLOCKS",
        "signals and projections up to 256 wide, one dictionary, no lengths", unrolled.Blocks, _LAYER, _layer, _forward,
    ),
    Hot(
        "unrolled_backward", "unrolled_backward_kernel", "unrolled_layer.BACKWARD_BLOCKS",
        "every width", unrolled.Blocks, _LAYER, _layer, _backward,
    ),
    Hot(
        "unrolled_update", "unrolled_update_kernel", "unrolled_layer.UPDATE_BLOCKS",
        "every width", unrolled.Blocks, {**_LAYER, "rows": (32, 64, 128, 256), "columns": (0,)}, _layer, _update,
    ),
    Hot(
        "cross_entropy", "_cross_entropy_kernel", "layerwise_cross_entropy.BLOCKS",
        "every vocabulary", entropy.CrossEntropyBlocks,
        {"columns": (512, 1024, 2048, 4096, 8192, 16384), "warps": (2, 4, 8, 16, 32)}, _logits, _entropy,
        overwritten="logits",
    ),
    Hot(
        "streaming_backward", "streaming_backward_kernel", "symmetric_attention_streaming.BACKWARD_BLOCKS",
        "widths up to 128", streaming.Blocks, _TILES, _tokens, _attend_backward,
    ),
    Hot(
        "streaming_forward", "streaming_forward_kernel", "symmetric_attention_streaming.FORWARD_BLOCKS",
        "widths up to 128", streaming.Blocks, _TILES, _tokens, _attend,
    ),
)  # fmt: skip
