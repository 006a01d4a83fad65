"""The kernels whose blocks are swept: what they are timed on, and which blocks are tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import (
    SweepArguments,
    SymmetricAttentionArguments,
    SymmetricAttentionBackwardArguments,
    UnrolledLayerArguments,
    UnrolledLayerBackwardArguments,
)
from cdt_fast.kernels.blocks import Blocks
from cdt_fast.kernels.cards import GpuSpec
from cdt_fast.kernels.launch import Launch, recording
from cdt_fast.kernels.layerwise_cross_entropy import cross_entropy_
from cdt_fast.kernels.symmetric_attention_streaming import streaming_backward, streaming_forward
from cdt_fast.kernels.unrolled_layer import unrolled_backward, unrolled_forward

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
    """A kernel of which a table of blocks has one row for the shape at hand."""

    name: str  # of the launcher
    function: str  # of the kernel
    table: str  # name of the table in `cdt_fast.kernels.blocks`
    row: str  # what chooses its row, beside the card and the numbers
    choices: Mapping[str, Sequence[int]]  # what is tried of each size of the blocks
    make: Callable[[torch.device, Mapping[str, int]], Inputs]  # `(device, sizes)` → the tensors that are read
    apply: Callable[[Inputs, Any], object]  # `(tensors, blocks)` calls the launcher; None: the blocks of its table
    overwritten: str | None = None  # the tensor that the kernel reads and then writes over

    def inputs(self, device: torch.device, size: str) -> Inputs:
        """The tensors that are read, on this device."""
        return self.make(device, _TOY if size == "toy" else _GPU)

    def launch(self, inputs: Inputs, card: GpuSpec, blocks: Mapping[str, int] | None) -> Launch:
        """The launch that the launcher would make on the card; its outputs hold whatever their memory held."""
        with recording(card) as launches:
            self.apply(inputs, None if blocks is None else Blocks(**blocks))
        return next(launch for launch in launches if launch.kernel.__name__ == self.function)

    def described(self, card: GpuSpec, size: str, blocks: Mapping[str, int] | None) -> Launch:
        """The same on tensors without memory."""
        with recording(card):
            inputs = self.inputs(torch.device("meta"), size)
        return self.launch(inputs, card, blocks)

    def default(self, card: GpuSpec, size: str) -> dict[str, int]:
        """The row that the table has for this shape, read off the launch."""
        blocks = self.described(card, size, None).blocks
        return {field: getattr(blocks, field) for field in Blocks._fields if field in self.choices}

    def candidates(self, card: GpuSpec, size: str) -> list[dict[str, int]]:
        """The default first, then what differs from it in one field, in two, and so on."""
        default = self.default(card, size)
        fields = list(default)
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


def _arguments(x: Inputs) -> dict[str, Any]:
    names = ("codes", "signal", "projection", "dictionary", "target")
    return {**{name: x[name] for name in names}, "step": 0.1, "threshold": 0.01}


def _differentiated(x: Inputs) -> UnrolledLayerBackwardArguments:
    return UnrolledLayerBackwardArguments(
        **_arguments(x),
        next_codes=x["codes"],
        next_projection=x["projection"],
        grad_next_codes=x["grad_codes"],
        grad_next_projection=x["grad_projection"],
        grad_error=x["grad_error"],
    )


def _forward(x: Inputs, blocks: Any) -> object:
    return unrolled_forward(UnrolledLayerArguments(**_arguments(x)), blocks)


def _backward(x: Inputs, blocks: Any) -> object:
    return unrolled_backward(_differentiated(x), blocks)


def _logits(device: torch.device, sizes: Mapping[str, int]) -> Inputs:
    rows, vocabulary = sizes["rows"], sizes["vocabulary"]
    return {
        "logits": _random(device, rows, vocabulary, scale=2.0),
        "targets": torch.randint(vocabulary, (rows,), device=device),
        **{name: torch.rand(rows, device=device) for name in ("losses", "log_sums", "scales")},
    }


def _entropy(x: Inputs, blocks: Any) -> object:
    rows = SweepArguments(**x, out=x["logits"])
    return cross_entropy_(rows, ignore_index=-100, softcap=None, smoothing=0.0, blocks=blocks)


def _tokens(device: torch.device, sizes: Mapping[str, int]) -> Inputs:
    z = _random(device, sizes["heads"], sizes["length"], sizes["head_width"], scale=0.2)
    output, log_sum_exp, _ = streaming_forward(SymmetricAttentionArguments(z=z))
    return {"z": z, "output": output, "log_sum_exp": log_sum_exp, "grad_output": _random(device, *z.shape)}


def _attend(x: Inputs, blocks: Any) -> object:
    return streaming_forward(SymmetricAttentionArguments(z=x["z"]), blocks)


def _attend_backward(x: Inputs, blocks: Any) -> object:
    given: dict[str, Any] = {**x, "kept": x["z"].new_empty(0)}
    return streaming_backward(SymmetricAttentionBackwardArguments(**given), blocks)


_LAYER = {"rows": (32, 64, 128), "atoms": (32, 64, 128), "columns": (32, 64), "warps": (4, 8), "stages": (2, 3, 4)}
_TILES = {"rows": (32, 64, 128), "keys": (16, 32, 64, 128), "warps": (4, 8), "stages": (1, 2, 3)}
HOT = (
    Hot(
        "unrolled_forward", "unrolled_forward_kernel", "UNROLLED_LAYER_LEAN",
        "signals and projections up to 256 wide, one dictionary, no lengths", _LAYER, _layer, _forward,
    ),
    Hot(
        "unrolled_backward", "unrolled_backward_kernel", "UNROLLED_LAYER_BACKWARD_LEAN",
        "one dictionary, no lengths", _LAYER, _layer, _backward,
    ),
    Hot(
        "cross_entropy", "cross_entropy_kernel", "LAYERWISE_CROSS_ENTROPY",
        "every vocabulary",
        {"columns": (512, 1024, 2048, 4096, 8192, 16384), "warps": (2, 4, 8, 16, 32), "stages": (2,)},
        _logits, _entropy,
        overwritten="logits",
    ),
    Hot(
        "streaming_backward", "streaming_backward_kernel", "SYMMETRIC_ATTENTION_STREAMING_BACKWARD",
        "widths up to 128", _TILES, _tokens, _attend_backward,
    ),
    Hot(
        "streaming_forward", "streaming_forward_kernel", "SYMMETRIC_ATTENTION_STREAMING",
        "widths up to 128", _TILES, _tokens, _attend,
    ),
)  # fmt: skip
