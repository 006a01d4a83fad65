"""The kernels whose blocks are swept: what they are timed on, and which blocks are tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cdt_fast.kernels.aot.case import called
from cdt_fast.kernels.blocks import Blocks
from cdt_fast.kernels.cards import GpuSpec
from cdt_fast.kernels.launch import Launch, recording
from cdt_fast.kernels.layerwise_cross_entropy import cross_entropy_
from cdt_fast.kernels.symmetric_attention_streaming import streaming_backward, streaming_forward
from cdt_fast.kernels.unrolled_layer import unrolled_backward, unrolled_forward

Given = dict[str, Any]
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

    launcher: Callable[..., Any]
    table: str  # name of the table in `cdt_fast.kernels.blocks`
    row: str  # what chooses its row, beside the card and the numbers
    choices: Mapping[str, Sequence[int]]  # what is tried of each size of the blocks
    make: Callable[[torch.device, Mapping[str, int]], Given]  # `(device, sizes)` → the fields of the launcher's record
    more: Given = field(default_factory=dict)  # what the launcher takes beside it
    overwritten: str | None = None  # the tensor that the kernel reads and then writes over

    @property
    def name(self) -> str:
        """What it is called in the results; that of the kernel ends in `_kernel`."""
        return self.launcher.__name__.rstrip("_")

    def given(self, device: torch.device, size: str) -> Given:
        """What the launcher reads, on this device."""
        return self.make(device, _TOY if size == "toy" else _GPU)

    def launch(self, given: Given, card: GpuSpec, blocks: Blocks | None) -> Launch:
        """The launch that the launcher would make on the card, by default with the blocks of its table; its outputs
        hold whatever their memory held."""
        with recording(card) as launches:
            called(self.launcher, given, **self.more, blocks=blocks)
        return next(launch for launch in launches if launch.kernel.__name__ == f"{self.name}_kernel")

    def described(self, card: GpuSpec, size: str, blocks: Blocks | None) -> Launch:
        """The same on tensors without memory."""
        with recording(card):
            given = self.given(torch.device("meta"), size)
        return self.launch(given, card, blocks)

    def fields(self, blocks: Blocks) -> dict[str, int]:
        """What there is a choice of."""
        return {name: size for name, size in blocks._asdict().items() if name in self.choices}

    def default(self, card: GpuSpec, size: str) -> Blocks:
        """The row that the table has for this shape, read off the launch."""
        return self.described(card, size, None).blocks

    def candidates(self, card: GpuSpec, size: str) -> list[Blocks]:
        """The default first, then what differs from it in one field, in two, and so on."""
        default = self.default(card, size)
        choices = [self.choices[name] for name in self.fields(default)]
        every = [
            default._replace(**dict(zip(self.fields(default), values, strict=True)))
            for values in itertools.product(*choices)
        ]
        every.sort(key=lambda blocks: sum(one != other for one, other in zip(blocks, default, strict=True)))
        return [default, *(blocks for blocks in every if blocks != default)][: _MOST_CANDIDATES[size]]


def _random(device: torch.device, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=device).mul_(scale).bfloat16()


def _layer(device: torch.device, sizes: Mapping[str, int]) -> Given:
    """As a layer in the middle of a network has them; half of the codes are zero."""
    batch = (sizes["sequences"], sizes["tokens"])
    width, atoms = sizes["width"], sizes["atoms"]
    return {
        "codes": _random(device, *batch, atoms, scale=0.1).relu(),
        "signal": _random(device, *batch, width),
        "projection": _random(device, *batch, width, scale=0.1),
        "dictionary": _random(device, width, atoms, scale=0.05),
        "target": _random(device, *batch, width),
        "step": 0.1,
        "threshold": 0.01,
    }


def _differentiated_layer(device: torch.device, sizes: Mapping[str, int]) -> Given:
    layer = _layer(device, sizes)
    return {
        **layer,
        "next_codes": layer["codes"],
        "next_projection": layer["projection"],
        "grad_next_codes": _random(device, *layer["codes"].shape),
        "grad_next_projection": _random(device, *layer["projection"].shape),
        "grad_error": torch.ones((), device=device),
    }


def _logits(device: torch.device, sizes: Mapping[str, int]) -> Given:
    rows, vocabulary = sizes["rows"], sizes["vocabulary"]
    logits = _random(device, rows, vocabulary, scale=2.0)
    return {
        "logits": logits,
        "out": logits,
        "targets": torch.randint(vocabulary, (rows,), device=device),
        **{name: torch.rand(rows, device=device) for name in ("losses", "log_sums", "scales")},
    }


def _tokens(device: torch.device, sizes: Mapping[str, int]) -> Given:
    return {"z": _random(device, sizes["heads"], sizes["length"], sizes["head_width"], scale=0.2)}


def _differentiated_tokens(device: torch.device, sizes: Mapping[str, int]) -> Given:
    given = _tokens(device, sizes)
    output, log_sum_exp, _ = called(streaming_forward, given)
    kept, grad_output = given["z"].new_empty(0), _random(device, *output.shape)
    return {**given, "output": output, "log_sum_exp": log_sum_exp, "kept": kept, "grad_output": grad_output}


_LAYER = {"rows": (32, 64, 128), "atoms": (32, 64, 128), "columns": (32, 64), "warps": (4, 8), "stages": (2, 3, 4)}
_TILES = {"rows": (32, 64, 128), "keys": (16, 32, 64, 128), "warps": (4, 8), "stages": (1, 2, 3)}
HOT = (
    Hot(
        unrolled_forward, "UNROLLED_LAYER_LEAN", "signals and projections up to 256 wide, one dictionary, no lengths",
        _LAYER, _layer,
    ),
    Hot(
        unrolled_backward, "UNROLLED_LAYER_BACKWARD_LEAN", "one dictionary, no lengths",
        _LAYER, _differentiated_layer,
    ),
    Hot(
        cross_entropy_, "LAYERWISE_CROSS_ENTROPY", "every vocabulary",
        {"columns": (512, 1024, 2048, 4096, 8192, 16384), "warps": (2, 4, 8, 16, 32), "stages": (2,)},
        _logits, {"ignore_index": -100, "softcap": None, "smoothing": 0.0},
        overwritten="logits",
    ),
    Hot(
        streaming_backward, "SYMMETRIC_ATTENTION_STREAMING_BACKWARD", "widths up to 128",
        _TILES, _differentiated_tokens,
    ),
    Hot(
        streaming_forward, "SYMMETRIC_ATTENTION_STREAMING", "widths up to 128",
        _TILES, _tokens,
    ),
)  # fmt: skip
