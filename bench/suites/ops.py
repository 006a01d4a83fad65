"""The other ops, forward and backward, against their formulas in eager torch and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.bench.baselines.formulas import identity_step
from cdt_fast.bench.baselines.support import compiled, modes
from cdt_fast.bench.case import Case, Implementation
from cdt_fast.bench.suites.inputs import (
    TOLERANCE,
    Apply,
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
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss_reference
from cdt_fast.ops.lista_step import lista_step_reference
from cdt_fast.ops.residual_linear import residual_linear_reference
from cdt_fast.ops.soft_threshold import soft_threshold_reference
from cdt_fast.ops.unrolled_layer import unrolled_layer_reference

# B windows of T tokens, signals of width n, codes of width m, L+1 depths.
SHAPES = {"toy": (3, 5, 8, 24, 3), "cpu": (400, 20, 256, 1024, 6), "gpu": (3200, 20, 256, 1024, 6)}
# A power of two, so that no dtype rounds it.
THRESHOLD = 2.0**-4


class Work(NamedTuple):
    """An op at one shape, and the implementations to do it."""

    name: str  # as the case has it
    sizes: Mapping[str, int]  # as the case has them
    make: Callable[[torch.Generator], Inputs]  # draws the inputs in float32
    eager: Apply  # the formula, which is also compiled
    ours: Apply  # the op
    flop: float  # of the cheapest known implementation
    numbers: float  # that it reads and writes
    peers: Mapping[str, Apply] = {}  # other implementations in eager torch, by name


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """Every op in float32 and bfloat16."""
    for number, make in enumerate((soft_threshold, lista_step, unrolled_layer, residual_linear, loss)):
        for dtype in (torch.float32, torch.bfloat16):
            # At toy size once: compiling takes longer than all the rest.
            compiles = size != "toy" or (number == 0 and dtype == torch.float32)
            yield _case(make(*SHAPES[size]), dtype, device, size, modes(device, size == "gpu") if compiles else ())


def _case(work: Work, dtype: torch.dtype, device: torch.device, size: str, modes: tuple[str, ...]) -> Case:
    inputs = shared(lambda: work.make(seeded(device)).to(dtype))
    return Case(
        suite="ops",
        name=", ".join([work.name, name_of(dtype), *(f"{name} {count}" for name, count in work.sizes.items())]),
        shape=work.sizes,
        dtype=name_of(dtype),
        implementations=(
            Implementation("eager", "eager", lambda: step_of(work.eager, inputs())),
            *compilers(modes, lambda mode: step_of(compiled(work.eager, mode, device), inputs())),
            *(peer(name, lambda apply=apply: step_of(apply, inputs())) for name, apply in work.peers.items()),
            Implementation("cdt_fast", "ours", lambda: step_of(work.ours, inputs())),
        ),
        expected=lambda: step_of(work.eager, inputs().to(formula_dtype(size)))(),
        tolerance=TOLERANCE[dtype],
        flop=work.flop,
        moved=work.numbers * dtype.itemsize,
    )


def soft_threshold(batch: int, tokens: int, n: int, m: int, depths: int) -> Work:
    """Shrinkage of codes."""
    count = batch * tokens * m
    return Work(
        "soft_threshold",
        {"B": batch, "T": tokens, "m": m},
        lambda generator: Inputs([normal(generator, batch, tokens, m)], [], [normal(generator, batch, tokens, m)]),
        eager=lambda inputs: [soft_threshold_reference(inputs.leaves[0], THRESHOLD)],
        ours=lambda inputs: [ops.soft_threshold(inputs.leaves[0], THRESHOLD)],
        # Forward a magnitude, a difference, a maximum and a sign; backward a comparison and a choice.
        flop=6.0 * count,
        numbers=4.0 * count,
    )


def lista_step(batch: int, tokens: int, n: int, m: int, depths: int) -> Work:
    """One LISTA step: two products forward, and backward two for the tokens and two for the dictionary."""
    rows = batch * tokens

    def make(generator: torch.Generator) -> Inputs:
        inputs = _layer_inputs(generator, batch, tokens, n, m)
        inputs.upstream.append(normal(generator, batch, tokens, m))
        return inputs

    return Work(
        "lista_step",
        {"B": batch, "T": tokens, "n": n, "m": m},
        make,
        eager=lambda inputs: [lista_step_reference(*inputs.leaves, step=inputs.step, threshold=THRESHOLD)],
        ours=lambda inputs: [ops.lista_step(*inputs.leaves, step=inputs.step, threshold=THRESHOLD)],
        flop=2.0 * rows * n * m * 6,
        numbers=4.0 * rows * m + 2.0 * rows * n + 2.0 * n * m,
    )


def unrolled_layer(batch: int, tokens: int, n: int, m: int, depths: int) -> Work:
    """A layer alone, which computes its own first projection, with the error of its reconstruction."""
    rows = batch * tokens

    def with_error(outputs: Sequence[Tensor], target: Tensor) -> list[Tensor]:
        wide = torch.promote_types(target.dtype, torch.float32)
        return [*outputs, (outputs[1].to(wide) - target.to(wide)).square().sum()]

    def eager(inputs: Inputs) -> list[Tensor]:
        outputs = unrolled_layer_reference(*inputs.leaves, step=inputs.step, threshold=THRESHOLD)
        return with_error(outputs, inputs.others[0])

    def identity(inputs: Inputs) -> list[Tensor]:
        codes, signal, dictionary = inputs.leaves
        projection = codes @ dictionary.mT
        codes = identity_step(codes, projection, signal, dictionary, step=inputs.step, threshold=THRESHOLD)
        return with_error([codes, codes @ dictionary.mT], inputs.others[0])

    def ours(inputs: Inputs) -> list[Tensor]:
        options = {"step": inputs.step, "threshold": THRESHOLD}
        return list(ops.unrolled_layer(*inputs.leaves, **options, target=inputs.others[0]))

    def make(generator: torch.Generator) -> Inputs:
        inputs = _layer_inputs(generator, batch, tokens, n, m)
        inputs.upstream += [normal(generator, batch, tokens, m), normal(generator, batch, tokens, n)]
        inputs.upstream.append(torch.tensor(0.5, device=generator.device))
        inputs.others.append(inputs.leaves[1] + 0.1 * normal(generator, batch, tokens, n))
        return inputs

    # A product with the dictionary: three forward (one of them the first projection), six backward. Products with the
    # attention weights: forward scores, mixed signal and mixed codes; backward the scores again, the gradient of the
    # weights from signal and codes, and the gradients of scores, signal and codes.
    large, narrow, wide = 9, 6, 3
    return Work(
        "unrolled_layer",
        {"B": batch, "T": tokens, "n": n, "m": m},
        make,
        eager,
        ours,
        flop=2.0 * rows * (n * m * large + tokens * (n * narrow + m * wide)),
        # Codes before and after and signal before and after, each with a gradient; the target; the dictionary.
        numbers=4.0 * rows * m + 5.0 * rows * n + 2.0 * n * m,
        peers={"eager by the identity": identity},
    )


def residual_linear(batch: int, tokens: int, n: int, m: int, depths: int) -> Work:
    """A linear map on a residual, behind a ReLU: one product forward and two backward."""
    rows = batch * tokens

    def make(generator: torch.Generator) -> Inputs:
        weight = normal(generator, n, m).mul_(0.2 * n**-0.5)
        residual = normal(generator, batch, tokens, m)
        residual += residual.sign()  # rounding decides about no sign
        leaves = [normal(generator, batch, tokens, n), weight, residual]
        return Inputs(leaves, [], [normal(generator, batch, tokens, m)])

    return Work(
        "residual_linear",
        {"B": batch, "T": tokens, "n": n, "m": m},
        make,
        eager=lambda inputs: [residual_linear_reference(*inputs.leaves)],
        ours=lambda inputs: [ops.residual_linear(*inputs.leaves)],
        flop=2.0 * rows * n * m * 3,
        numbers=4.0 * rows * m + 2.0 * rows * n + 2.0 * n * m,
    )


def loss(batch: int, tokens: int, n: int, m: int, depths: int) -> Work:
    """The reconstruction loss of all depths, weighted."""
    count = batch * tokens * n

    def make(generator: torch.Generator) -> Inputs:
        clean = normal(generator, batch, tokens, n)
        leaves = [clean + 0.3 * normal(generator, batch, tokens, n) for _ in range(depths)]
        weights = torch.linspace(-0.5, 1.5, 2 * depths, device=generator.device)[1::2]  # none of them zero
        return Inputs(leaves, [clean, weights], [torch.ones((), device=generator.device)])

    def eager(inputs: Inputs) -> list[Tensor]:
        target, weights = inputs.others
        wide = torch.promote_types(target.dtype, torch.float32)
        reconstructions = [reconstruction.to(wide) for reconstruction in inputs.leaves]
        losses = layerwise_reconstruction_loss_reference(reconstructions, target.to(wide))
        return [(weights * losses).sum().to(target.dtype)]

    def ours(inputs: Inputs) -> list[Tensor]:
        target, weights = inputs.others
        total, _ = ops.layerwise_reconstruction_loss(inputs.leaves, target, depth_weights=weights)
        return [total.to(target.dtype)]

    return Work(
        "layerwise_reconstruction_loss",
        {"B": batch, "T": tokens, "n": n, "depths": depths},
        make,
        eager,
        ours,
        # Forward a difference, a square and a sum; backward a difference and a factor.
        flop=5.0 * depths * count,
        numbers=(2.0 * depths + 1.0) * count,
    )


def _layer_inputs(generator: torch.Generator, batch: int, tokens: int, n: int, m: int) -> Inputs:
    """Sparse codes, a signal near what they stand for, a dictionary, and 1/c with c about its squared norm.

    The tokens of a window share their support, as those of a still scene do, so that no update comes near the
    threshold: there rounding would decide whether a gradient passes, and hide what the gate looks for.
    """
    dictionary = normal(generator, n, m).mul_(n**-0.5)
    support = soft_threshold_reference(normal(generator, batch, 1, m), 1.5).sign()
    # Squared norms of projections of a few units: in bfloat16 larger scores would be off by a whole one.
    codes = support * (4 + torch.rand(batch, tokens, m, generator=generator, device=generator.device)) * THRESHOLD
    signal = codes @ dictionary.mT + 0.1 * THRESHOLD * normal(generator, batch, tokens, n)
    # The largest singular value of such a matrix is close to 1 + sqrt(m / n).
    return Inputs([codes, signal, dictionary], [], [], step=1 / (1 + (m / n) ** 0.5) ** 2)
