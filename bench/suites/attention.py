"""Symmetric attention, forward and backward: with tied values, with values of another width, and with padding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.bench.baselines import compiled, eager_attention, flex_attention, sdpa, xformers_attention
from cdt_fast.bench.baselines.support import tried
from cdt_fast.bench.case import Case, Step, Unavailable, Way
from cdt_fast.bench.suites.inputs import TOLERANCE, Shared, formula_dtype, name_of, normal, peer, seeded

Attend = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


class Shape(NamedTuple):
    """B sequences of T tokens of width d; values of width k (0: tied); of random lengths or of full length."""

    batch: int
    tokens: int
    width: int
    values: int = 0
    padded: bool = False


# Packed (T 20 is a training window), one tile, many tiles; narrow and wide.
SHAPES = {
    "toy": (Shape(3, 5, 8), Shape(2, 20, 16, values=24), Shape(3, 7, 8, padded=True)),
    "cpu": (
        Shape(400, 20, 256),
        Shape(64, 128, 64),
        Shape(16, 512, 128),
        Shape(4, 1024, 1024),
        Shape(1, 4096, 64),
        Shape(400, 20, 256, values=1024),
        Shape(8, 512, 64, values=256),
        Shape(400, 20, 256, padded=True),
        Shape(16, 512, 128, padded=True),
    ),
    "gpu": (
        Shape(3200, 20, 64),
        Shape(3200, 20, 256),
        Shape(3200, 20, 1024),
        Shape(512, 64, 256),
        Shape(256, 512, 64),
        Shape(64, 512, 512),
        Shape(64, 1024, 128),
        Shape(16, 2048, 1024),
        Shape(32, 4096, 64),
        Shape(8, 4096, 256),
        Shape(3200, 20, 256, values=1024),
        Shape(64, 1024, 128, values=512),
        Shape(3200, 20, 256, padded=True),
        Shape(64, 1024, 128, padded=True),
    ),
}


@dataclass
class Inputs:
    """`z` `[B, T, d]` and `values` `[B, T, k]` with gradients, `lengths` `[B]`, `upstream` as the output."""

    z: Tensor
    values: Tensor | None
    lengths: Tensor | None
    upstream: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers as leaves of another dtype."""
        values = None if self.values is None else self.values.detach().to(dtype).requires_grad_()
        return Inputs(self.z.detach().to(dtype).requires_grad_(), values, self.lengths, self.upstream.to(dtype))


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """All shapes in float32 and bfloat16."""
    for number, shape in enumerate(SHAPES[size]):
        for dtype in (torch.float32, torch.bfloat16):
            # Compiling takes seconds to a minute: at toy size once, and autotuned where it may matter most.
            compiles = size != "toy" or (number == 0 and dtype == torch.float32)
            autotunes = shape.tokens == 512 and not shape.padded
            yield case_of(shape, dtype, device, size, compiled.modes(device, autotunes) if compiles else ())


def case_of(shape: Shape, dtype: torch.dtype, device: torch.device, size: str, modes: tuple[str, ...] = ()) -> Case:
    """The attention and its gradients in every way, of torch.compile in these modes."""
    inputs = Shared(lambda: make_inputs(shape, dtype, device))
    ways = [
        Way("eager", "eager", lambda: _step(eager_attention.attend, inputs())),
        *(
            Way(compiled.name_of(mode), "peer", lambda mode=mode: _compiled_step(inputs(), mode), late=True)
            for mode in modes
        ),
        peer("SDPA", lambda: _step(sdpa.attend, inputs())),
        *(
            peer(f"SDPA, {name}", lambda name=name: _step(sdpa.attend_by(name), inputs()))
            for name in (sdpa.BACKENDS if device.type == "cuda" else ())
        ),
        peer("FlexAttention", lambda: _flex_step(inputs()), late=True),
        peer("xformers", lambda: _xformers_step(inputs())),
        Way("cdt_fast", "ours", lambda: _step(_fused, inputs())),
    ]
    kind = "tied values" if not shape.values else f"values of width {shape.values}"
    return Case(
        suite="attention",
        name=f"symmetric attention, {name_of(dtype)}, B {shape.batch}, T {shape.tokens}, d {shape.width}, {kind}"
        + (", padded" if shape.padded else ""),
        shape={"B": shape.batch, "T": shape.tokens, "d": shape.width, "k": shape.values or shape.width},
        dtype=name_of(dtype),
        ways=tuple(ways),
        expected=lambda: _step(eager_attention.attend, inputs().to(formula_dtype(size)))(),
        tolerance=TOLERANCE[dtype],
        flop=flop(shape),
        moved=moved(shape, dtype),
        note="lengths from T/2 to T; the floor is that of the tokens that count" if shape.padded else "",
    )


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Tokens of squared norm about 4: each attends to itself most, and to all others."""
    generator = seeded(device)
    z = normal(generator, shape.batch, shape.tokens, shape.width).mul_(2 * shape.width**-0.5).to(dtype)
    values = normal(generator, shape.batch, shape.tokens, shape.values).to(dtype) if shape.values else None
    upstream = normal(generator, *z.shape[:-1], shape.values or shape.width).to(dtype)
    lengths = torch.tensor(lengths_of(shape), device=device) if shape.padded else None
    return Inputs(z.requires_grad_(), None if values is None else values.requires_grad_(), lengths, upstream)


def lengths_of(shape: Shape) -> list[int]:
    """The tokens that count in each sequence: from T/2 to T where the shape is padded."""
    if not shape.padded:
        return [shape.tokens] * shape.batch
    generator = torch.Generator().manual_seed(1)
    return torch.randint((shape.tokens + 1) // 2, shape.tokens + 1, (shape.batch,), generator=generator).tolist()


def flop(shape: Shape) -> float:
    """Of the products, at two a multiplication: forward the scores and the output.

    Backward three where the attention weights are no larger than the tokens and may be kept: the gradients of weights,
    values and tokens. Else five a pair of tiles: the scores again, and the gradient of the weights of the other tile
    too (or, where the values are wider, the gradient of the scores in a product more with the tokens).
    """
    pairs = sum(length * length for length in lengths_of(shape))
    values = shape.values or shape.width
    products = 2 * shape.width + 3 * values
    if shape.tokens > shape.width:
        products += shape.width + min(shape.width, values)
    return 2.0 * pairs * products


def moved(shape: Shape, dtype: torch.dtype) -> float:
    """Bytes of tokens, values, output, and their gradients."""
    tokens = sum(lengths_of(shape))
    # The tokens and, where they are not tied, the values; each with a gradient, and so has the output.
    width = 2 * (shape.width + shape.values) + 2 * (shape.values or shape.width)
    return float(dtype.itemsize * tokens * width)


def _step(attend: Attend, inputs: Inputs) -> Step:
    leaves = [inputs.z] if inputs.values is None else [inputs.z, inputs.values]

    def step() -> list[Tensor]:
        output = attend(inputs.z, inputs.values, inputs.lengths)
        return [output.detach(), *torch.autograd.grad(output, leaves, inputs.upstream)]

    return step


def _fused(z: Tensor, values: Tensor | None, lengths: Tensor | None) -> Tensor:
    return ops.symmetric_attention(z, values, lengths=lengths)


def _compiled_step(inputs: Inputs, mode: str) -> Step:
    return compiled.first_run(_step(compiled.compiled(eager_attention.attend, mode, inputs.z.device), inputs))


@functools.cache
def _flex_refusal_on_cpu() -> str:
    """What FlexAttention says where it has no backward on a CPU, asked once: each answer takes seconds of compilation;
    empty where it has one."""
    tokens = torch.zeros(1, 16, 16, requires_grad=True)
    attend = flex_attention.prepare(tokens, None)
    try:
        tried(lambda: [*torch.autograd.grad(attend(tokens, None).sum(), tokens)])
    except Unavailable as reason:
        return str(reason)
    return ""


def _flex_step(inputs: Inputs) -> Step:
    if inputs.z.device.type == "cpu" and (reason := _flex_refusal_on_cpu()):
        raise Unavailable(reason)
    attend = flex_attention.prepare(inputs.z, inputs.lengths)
    return compiled.first_run(_step(lambda z, values, lengths: attend(z, values), inputs))


def _xformers_step(inputs: Inputs) -> Step:
    attend = xformers_attention.prepare(inputs.z, inputs.lengths)
    return _step(lambda z, values, lengths: attend(z, values), inputs)
