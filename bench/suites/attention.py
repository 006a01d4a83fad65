"""Symmetric attention, forward and backward: with tied values, with values of another width, and with padding.

An implementation is prepared for tokens `z` `[B, T, d]` and their lengths, and then called as `attend(z)` or
`attend(z, values)`, which is `softmax_rows(z zᵀ) values`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cdt_fast import ops
from cdt_fast.bench.case import Case, Implementation, Step, Unavailable
from cdt_fast.bench.suites import support
from cdt_fast.bench.suites.support import Inputs, imported, normal, peer, require_gpu, step_of
from cdt_fast.ops.common import padding_mask, without_padding
from cdt_fast.ops.symmetric_attention import symmetric_attention_reference

Attend = Callable[..., Tensor]
Prepare = Callable[[Tensor, "Tensor | None"], Attend]
SDPA_BACKENDS = {
    "SDPA, flash": SDPBackend.FLASH_ATTENTION,
    "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA, efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Shape(NamedTuple):
    """B sequences of T tokens of width d; values of width k (0: tied); of random lengths or of full length."""

    batch: int
    tokens: int
    width: int
    values: int = 0
    padded: bool = False


# Packed (T 20 is a training window), one tile, many tiles; narrow and wide; wider values; padding.
_CPU = (400, 20, 256), (64, 128, 64), (16, 512, 128), (4, 1024, 1024), (1, 4096, 64), (400, 20, 256, 1024)
_GPU = (3200, 20, 64), (3200, 20, 256), (512, 64, 256), (256, 512, 64), (64, 1024, 128), (16, 2048, 1024)
SHAPES: dict[str, list[tuple[Any, ...]]] = {
    "toy": [(3, 5, 8), (2, 20, 16, 24), (3, 7, 8, 0, True)],
    "cpu": [*_CPU, (8, 512, 64, 256), (400, 20, 256, 0, True), (16, 512, 128, 0, True)],
    "gpu": [*_GPU, (8, 4096, 256), (3200, 20, 256, 1024), (64, 1024, 128, 512), (3200, 20, 256, 0, True)],
}


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """All shapes in float32 and bfloat16."""
    for shape in SHAPES[size]:
        for dtype in ("float32", "bfloat16"):
            yield _case(Shape(*shape), dtype, device, size)


def _case(shape: Shape, dtype: str, device: torch.device, size: str) -> Case:
    inputs = support.shared(lambda: make_inputs(shape, getattr(torch, dtype), device))
    # Autotuning takes up to a minute: where it may matter most.
    autotune = shape.tokens == 512 and not shape.padded
    compilers = support.compilers(symmetric_attention_reference, device, size, autotune)
    backends = SDPA_BACKENDS if device.type == "cuda" else {}
    peers: dict[str, Prepare] = {
        **{name: lambda *given, compile=compile: plainly(compile())(*given) for name, compile in compilers.items()},
        "SDPA": sdpa,
        **{name: functools.partial(sdpa, backend=backend) for name, backend in backends.items()},
        "FlexAttention": flex,
        "xformers": xformers,
    }
    kind = f"values of width {shape.values}" if shape.values else "tied values"
    title = f"symmetric attention, {dtype}, B {shape.batch}, T {shape.tokens}, d {shape.width}, {kind}"
    return Case(
        suite="attention",
        name=title + (", padded" if shape.padded else ""),
        shape={"B": shape.batch, "T": shape.tokens, "d": shape.width, "k": shape.values or shape.width},
        dtype=dtype,
        implementations=(
            Implementation("eager", "eager", lambda: _step(eager, inputs())),
            *(peer(name, lambda prepare=prepare: _step(prepare, inputs())) for name, prepare in peers.items()),
            Implementation("cdt_fast", "ours", lambda: _step(fused, inputs())),
        ),
        expected=lambda: _step(eager, inputs().to(support.formula_dtype(size)))(),
        tolerance=support.TOLERANCE[dtype],
        note="lengths from T/2 to T" if shape.padded else "",
    )


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """`z` `[B, T, d]` of squared norm about 4 (each token attends to itself most, and to all others), `values`
    `[B, T, k]` unless they are tied, and `lengths` `[B]` if there is padding."""
    generator = support.seeded(device)
    leaves = [normal(generator, shape.batch, shape.tokens, shape.width).mul_(2 * shape.width**-0.5)]
    if shape.values:
        leaves.append(normal(generator, shape.batch, shape.tokens, shape.values))
    upstream = normal(generator, shape.batch, shape.tokens, shape.values or shape.width)
    bounds = (shape.tokens + 1) // 2, shape.tokens + 1
    lengths = torch.randint(*bounds, (shape.batch,), generator=torch.Generator().manual_seed(1))
    return Inputs(leaves, [upstream], [lengths.to(device)] if shape.padded else []).to(dtype)


def _step(prepare: Prepare, inputs: Inputs) -> Step:
    attend = prepare(inputs.leaves[0], inputs.others[0] if inputs.others else None)
    return step_of(lambda inputs: [attend(*inputs.leaves)], inputs)


def plainly(attention: Attend) -> Prepare:
    """An attention that takes the lengths themselves."""
    return lambda z, lengths: functools.partial(attention, lengths=lengths)


# As everyone would write it first: scores, a softmax and a product, differentiated by torch.
eager = plainly(symmetric_attention_reference)
fused = plainly(ops.symmetric_attention)


def sdpa(z: Tensor, lengths: Tensor | None, backend: SDPBackend | None = None) -> Attend:
    """torch's scaled dot-product attention by the implementation that torch picks, or by one of `SDPA_BACKENDS`."""

    def attend(z: Tensor, values: Tensor | None = None) -> Tensor:
        padding = padding_mask(lengths, z)
        mask = None if padding is None else ~padding[:, None, None, :]
        tokens, read = z.unsqueeze(1), (z if values is None else values).unsqueeze(1)
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            output = torch.nn.functional.scaled_dot_product_attention(tokens, tokens, read, mask, scale=1.0)
        return without_padding(output.squeeze(1), padding)

    return attend


def flex(z: Tensor, lengths: Tensor | None) -> Attend:
    """FlexAttention, compiled on its first call; the lengths as a mask of blocks, made once for all steps."""
    require_gpu("FlexAttention's backward", z.device)
    padding, blocks = padding_mask(lengths, z), None
    if lengths is not None:
        sizes = len(z), None, z.shape[1], z.shape[1]
        blocks = create_block_mask(lambda text, head, row, column: column < lengths[text], *sizes, device=z.device)
    # A full graph is not required: the error of what it cannot do would be hidden in torch.compile's own.
    function = torch.compile(flex_attention, dynamic=False)

    def attend(z: Tensor, values: Tensor | None = None) -> Tensor:
        heads, read = z.unsqueeze(1), (z if values is None else values).unsqueeze(1)
        output = function(heads, heads, read, block_mask=blocks, scale=1.0)
        return without_padding(output.squeeze(1), padding)

    return attend


def xformers(z: Tensor, lengths: Tensor | None) -> Attend:
    """xformers' memory-efficient attention of full sequences."""
    attention = imported("xformers.ops", z.device).memory_efficient_attention
    if lengths is not None:
        raise Unavailable("xformers is compared on full sequences alone")

    def attend(z: Tensor, values: Tensor | None = None) -> Tensor:
        heads, read = z.unsqueeze(2), (z if values is None else values).unsqueeze(2)
        return attention(heads, heads, read, scale=1.0).squeeze(2)

    return attend
