"""The other ops, forward and backward, against their formulas in eager torch and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.bench.baselines import compiled
from cdt_fast.bench.baselines.formulas import identity_step
from cdt_fast.bench.case import Case, Implementation, Step
from cdt_fast.bench.suites.inputs import TOLERANCE, Shared, compilers, formula_dtype, name_of, normal, peer, seeded
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss_reference
from cdt_fast.ops.lista_step import lista_step_reference
from cdt_fast.ops.residual_linear import residual_linear_reference
from cdt_fast.ops.soft_threshold import soft_threshold_reference
from cdt_fast.ops.unrolled_layer import unrolled_layer_reference


class Shape(NamedTuple):
    """B windows of T tokens, signals of width n, codes of width m, L+1 depths."""

    batch: int
    tokens: int
    signal: int
    codes: int
    depths: int


SHAPES = {"toy": Shape(3, 5, 8, 24, 3), "cpu": Shape(400, 20, 256, 1024, 6), "gpu": Shape(3200, 20, 256, 1024, 6)}
# A power of two, so that no dtype rounds it.
THRESHOLD = 2.0**-4


@dataclass
class Inputs:
    """What an op reads."""

    leaves: list[Tensor]  # with gradients, in the order in which the op takes them
    others: list[Tensor]  # without a gradient
    upstream: list[Tensor]  # gradients of the outputs
    step: float = 0.0  # 1/c of the dictionary among the leaves

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers as leaves of another dtype."""
        return Inputs(
            [leaf.detach().to(dtype).requires_grad_() for leaf in self.leaves],
            [other.to(dtype) for other in self.others],
            [gradient.to(dtype) for gradient in self.upstream],
            self.step,
        )


Apply = Callable[[Inputs], Sequence[Tensor]]


class Work(NamedTuple):
    """An op at one shape, and the implementations to do it."""

    # name, sizes: as the case has them
    name: str
    sizes: Mapping[str, int]
    # draws leaves, others and upstream gradients, in float32, from a generator
    make: Callable[[torch.Generator], Inputs]
    eager: Apply  # the formula, which is also compiled
    ours: Apply  # the op
    # flop, numbers: of the cheapest known implementation; how many numbers it reads and writes
    flop: float
    numbers: float
    peers: Mapping[str, Apply] = {}  # other implementations in eager torch, by name


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """Every op in float32 and bfloat16."""
    for number, work in enumerate(works(SHAPES[size])):
        for dtype in (torch.float32, torch.bfloat16):
            # At toy size once: compiling takes longer than all the rest.
            compiles = size != "toy" or (number == 0 and dtype == torch.float32)
            modes = compiled.modes(device, autotune=size == "gpu") if compiles else ()
            yield case_of(work, dtype, device, size, modes)


def case_of(work: Work, dtype: torch.dtype, device: torch.device, size: str, modes: tuple[str, ...] = ()) -> Case:
    """An op by its formula in eager torch, compiled in these modes, by the peers that there are, and by itself."""

    def make() -> Inputs:
        return work.make(seeded(device)).to(dtype)

    inputs = Shared(make)

    sizes = ", ".join(f"{name} {count}" for name, count in work.sizes.items())
    return Case(
        suite="ops",
        name=f"{work.name}, {name_of(dtype)}, {sizes}",
        shape=work.sizes,
        dtype=name_of(dtype),
        implementations=(
            Implementation("eager", "eager", lambda: _step(work.eager, inputs())),
            *compilers(modes, lambda mode: _step(compiled.compiled(work.eager, mode, device), inputs())),
            *(peer(name, lambda apply=apply: _step(apply, inputs())) for name, apply in work.peers.items()),
            Implementation("cdt_fast", "ours", lambda: _step(work.ours, inputs())),
        ),
        expected=lambda: _step(work.eager, inputs().to(formula_dtype(size)))(),
        tolerance=TOLERANCE[dtype],
        flop=work.flop,
        moved=work.numbers * dtype.itemsize,
    )


def _step(apply: Apply, inputs: Inputs) -> Step:
    def step() -> list[Tensor]:
        outputs = apply(inputs)
        gradients = torch.autograd.grad(outputs, inputs.leaves, inputs.upstream)
        return [*(output.detach() for output in outputs), *gradients]

    return step


def works(shape: Shape) -> tuple[Work, ...]:
    """All ops at one shape."""
    return soft_threshold(shape), lista_step(shape), unrolled_layer(shape), residual_linear(shape), loss(shape)


def soft_threshold(shape: Shape) -> Work:
    """Shrinkage of codes."""
    sizes = (shape.batch, shape.tokens, shape.codes)
    count = shape.batch * shape.tokens * shape.codes
    return Work(
        "soft_threshold",
        {"B": shape.batch, "T": shape.tokens, "m": shape.codes},
        lambda generator: Inputs([normal(generator, *sizes)], [], [normal(generator, *sizes)]),
        eager=lambda inputs: [soft_threshold_reference(inputs.leaves[0], THRESHOLD)],
        ours=lambda inputs: [ops.soft_threshold(inputs.leaves[0], THRESHOLD)],
        # Forward a magnitude, a difference, a maximum and a sign; backward a comparison and a choice.
        flop=6.0 * count,
        numbers=4.0 * count,
    )


def lista_step(shape: Shape) -> Work:
    """One LISTA step: two products forward, and backward two for the tokens and two for the dictionary."""
    batch, tokens, n, m, _ = shape
    rows = batch * tokens

    def eager(inputs: Inputs) -> list[Tensor]:
        return [lista_step_reference(*inputs.leaves, step=inputs.step, threshold=THRESHOLD)]

    def ours(inputs: Inputs) -> list[Tensor]:
        return [ops.lista_step(*inputs.leaves, step=inputs.step, threshold=THRESHOLD)]

    return Work(
        "lista_step",
        {"B": batch, "T": tokens, "n": n, "m": m},
        lambda generator: _layer_inputs(generator, shape, lambda: [normal(generator, batch, tokens, m)]),
        eager,
        ours,
        flop=2.0 * rows * n * m * 6,
        numbers=4.0 * rows * m + 2.0 * rows * n + 2.0 * n * m,
    )


def unrolled_layer(shape: Shape) -> Work:
    """A layer alone, which computes its own first projection, with the error of its reconstruction."""
    batch, tokens, n, m, _ = shape
    rows = batch * tokens

    def with_error(outputs: Sequence[Tensor], target: Tensor) -> list[Tensor]:
        wide = torch.promote_types(target.dtype, torch.float32)
        return [*outputs, (outputs[1].to(wide) - target.to(wide)).square().sum()]

    def eager(inputs: Inputs) -> list[Tensor]:
        options = {"step": inputs.step, "threshold": THRESHOLD}
        return with_error(unrolled_layer_reference(*inputs.leaves, **options), inputs.others[0])

    def identity(inputs: Inputs) -> list[Tensor]:
        codes, signal, dictionary = inputs.leaves
        projection = codes @ dictionary.mT
        codes = identity_step(codes, projection, signal, dictionary, step=inputs.step, threshold=THRESHOLD)
        return with_error([codes, codes @ dictionary.mT], inputs.others[0])

    def ours(inputs: Inputs) -> list[Tensor]:
        options = {"step": inputs.step, "threshold": THRESHOLD}
        return list(ops.unrolled_layer(*inputs.leaves, **options, target=inputs.others[0]))

    def make(generator: torch.Generator) -> Inputs:
        def upstream() -> list[Tensor]:
            weight = torch.tensor(0.5, device=generator.device)
            return [normal(generator, batch, tokens, m), normal(generator, batch, tokens, n), weight]

        inputs = _layer_inputs(generator, shape, upstream)
        inputs.others.append(inputs.leaves[1].detach() + 0.1 * normal(generator, batch, tokens, n))
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


def residual_linear(shape: Shape) -> Work:
    """A linear map on a residual, behind a ReLU: one product forward and two backward."""
    batch, tokens, n, m, _ = shape
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


def loss(shape: Shape) -> Work:
    """The reconstruction loss of all depths, weighted."""
    batch, tokens, n, _, depths = shape
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


def _layer_inputs(generator: torch.Generator, shape: Shape, upstream: Callable[[], list[Tensor]]) -> Inputs:
    """Sparse codes, a signal near what they stand for, a dictionary, and 1/c with c about its squared norm.

    The tokens of a window share their support, as those of a still scene do, so that no update comes near the
    threshold: there rounding would decide whether a gradient passes, and hide what the gate looks for.
    """
    batch, tokens, n, m, _ = shape
    dictionary = normal(generator, n, m).mul_(n**-0.5)
    support = soft_threshold_reference(normal(generator, batch, 1, m), 1.5).sign()
    # Squared norms of projections of a few units: in bfloat16 larger scores would be off by a whole one.
    codes = support * (4 + torch.rand(batch, tokens, m, generator=generator, device=generator.device)) * THRESHOLD
    signal = codes @ dictionary.mT + 0.1 * THRESHOLD * normal(generator, batch, tokens, n)
    # The largest singular value of such a matrix is close to 1 + sqrt(m / n).
    step = 1 / (1 + (m / n) ** 0.5) ** 2
    return Inputs([codes, signal, dictionary], [], upstream(), step)
