"""Symmetric attention, forward and backward: with tied values, with values of another width, and with padding."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.bench.baselines import attention as others
from cdt_fast.bench.baselines.attention import Attend, Prepare
from cdt_fast.bench.baselines.support import first_run, modes
from cdt_fast.bench.case import Case, Implementation, Step
from cdt_fast.bench.suites.inputs import (
    TOLERANCE,
    Inputs,
    compilers,
    formula_dtype,
    name_of,
    normal,
    peer,
    seeded,
    shared,
    step_of,
)


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


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """All shapes in float32 and bfloat16."""
    for number, shape in enumerate(SHAPES[size]):
        for dtype in (torch.float32, torch.bfloat16):
            # Compiling takes seconds to a minute: at toy size once, and autotuned where it may matter most.
            compiles = size != "toy" or (number == 0 and dtype == torch.float32)
            autotunes = shape.tokens == 512 and not shape.padded
            yield case_of(shape, dtype, device, size, modes(device, autotunes) if compiles else ())


def case_of(shape: Shape, dtype: torch.dtype, device: torch.device, size: str, modes: tuple[str, ...] = ()) -> Case:
    """The attention and its gradients in every implementation, of torch.compile in these modes."""
    inputs = shared(lambda: make_inputs(shape, dtype, device))

    def step(prepare: Prepare) -> Step:
        return _step(prepare, inputs())

    backends = others.SDPA_BACKENDS if device.type == "cuda" else ()
    sdpa = [peer(f"SDPA, {one}", lambda one=one: step(functools.partial(others.sdpa, backend=one))) for one in backends]
    kind = "tied values" if not shape.values else f"values of width {shape.values}"
    return Case(
        suite="attention",
        name=f"symmetric attention, {name_of(dtype)}, B {shape.batch}, T {shape.tokens}, d {shape.width}, {kind}"
        + (", padded" if shape.padded else ""),
        shape={"B": shape.batch, "T": shape.tokens, "d": shape.width, "k": shape.values or shape.width},
        dtype=name_of(dtype),
        implementations=(
            Implementation("eager", "eager", lambda: step(others.eager)),
            *compilers(modes, lambda mode: step(functools.partial(others.torch_compiled, mode=mode))),
            peer("SDPA", lambda: step(others.sdpa)),
            *sdpa,
            Implementation("FlexAttention", "peer", lambda: first_run(step(others.flex)), late=True),
            peer("xformers", lambda: step(others.xformers)),
            Implementation("cdt_fast", "ours", lambda: step(_fused)),
        ),
        expected=lambda: _step(others.eager, inputs().to(formula_dtype(size)))(),
        tolerance=TOLERANCE[dtype],
        flop=flop(shape),
        moved=moved(shape, dtype),
        note="lengths from T/2 to T; the floor is that of the tokens that count" if shape.padded else "",
    )


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """`z` `[B, T, d]` of squared norm about 4 (each token attends to itself most, and to all others), `values`
    `[B, T, k]` unless they are tied, and `lengths` `[B]` where there is padding."""
    generator = seeded(device)
    leaves = [normal(generator, shape.batch, shape.tokens, shape.width).mul_(2 * shape.width**-0.5)]
    if shape.values:
        leaves.append(normal(generator, shape.batch, shape.tokens, shape.values))
    upstream = normal(generator, shape.batch, shape.tokens, shape.values or shape.width)
    lengths = [torch.tensor(lengths_of(shape), device=device)] if shape.padded else []
    return Inputs(leaves, lengths, [upstream]).to(dtype)


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


def _step(prepare: Prepare, inputs: Inputs) -> Step:
    attend = prepare(inputs.leaves[0], inputs.others[0] if inputs.others else None)
    return step_of(lambda inputs: [attend(*inputs.leaves)], inputs)


def _fused(z: Tensor, lengths: Tensor | None) -> Attend:
    return functools.partial(ops.symmetric_attention, lengths=lengths)
