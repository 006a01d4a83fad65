"""The other ops, forward and backward, against their formulas in eager torch and compiled."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from cdt_fast import ops
from cdt_fast.bench.case import Case, Implementation
from cdt_fast.bench.suites import support
from cdt_fast.bench.suites.step import identity_step
from cdt_fast.bench.suites.support import Apply, Inputs, normal, peer, step_of, widened
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss_reference
from cdt_fast.ops.lista_step import lista_step_reference
from cdt_fast.ops.residual_linear import residual_linear_reference
from cdt_fast.ops.soft_threshold import soft_threshold_reference
from cdt_fast.ops.unrolled_layer import unrolled_layer_reference


class Sizes(NamedTuple):
    """B windows of T tokens, signals of width n, codes of width m, L+1 depths."""

    B: int
    T: int
    n: int
    m: int
    depths: int


SIZES = {"toy": Sizes(3, 5, 8, 24, 3), "cpu": Sizes(400, 20, 256, 1024, 6), "gpu": Sizes(3200, 20, 256, 1024, 6)}
THRESHOLD = 2.0**-4  # a power of two, so that no dtype rounds it


class Work(NamedTuple):
    """An op, and the implementations of it."""

    name: str
    sizes: str  # the names of those that the case has
    make: Callable[[Generator, Sizes], Inputs]  # draws the inputs in float32
    eager: Apply  # the formula, which is also compiled
    ours: Apply  # the op
    peers: Mapping[str, Apply] = {}  # other implementations in eager torch, by name


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """Every op in float32 and bfloat16."""
    for work in WORKS:
        for dtype in ("float32", "bfloat16"):
            yield _case(work, dtype, device, size)


def _case(work: Work, dtype: str, device: torch.device, size: str) -> Case:
    inputs = support.shared(lambda: work.make(support.seeded(device), SIZES[size]).to(getattr(torch, dtype)))
    shape = {name: getattr(SIZES[size], name) for name in work.sizes.split()}
    compilers = support.compilers(work.eager, device, size, autotune=size == "gpu")
    peers = {name: lambda compile=compile: step_of(compile(), inputs()) for name, compile in compilers.items()}
    peers |= {name: lambda apply=apply: step_of(apply, inputs()) for name, apply in work.peers.items()}
    return Case(
        suite="ops",
        name=", ".join([work.name, dtype, *(f"{name} {count}" for name, count in shape.items())]),
        shape=shape,
        dtype=dtype,
        implementations=(
            Implementation("eager", "eager", lambda: step_of(work.eager, inputs())),
            *(peer(name, prepare) for name, prepare in peers.items()),
            Implementation("cdt_fast", "ours", lambda: step_of(work.ours, inputs())),
        ),
        expected=lambda: step_of(work.eager, inputs().to(support.formula_dtype(size)))(),
        tolerance=support.TOLERANCE[dtype],
    )


def _codes(generator: Generator, sizes: Sizes) -> Inputs:
    codes = normal(generator, sizes.B, sizes.T, sizes.m)
    return Inputs([codes], [normal(generator, sizes.B, sizes.T, sizes.m)], [])


def _layer(generator: Generator, sizes: Sizes, projects: bool = False) -> Inputs:
    """Sparse codes, a signal near what they stand for, a dictionary, and 1/c with c about its squared norm."""
    # The tokens of a window share their support: no update comes near the threshold, where rounding would decide
    # whether a gradient passes.
    batch, tokens, n, m, _ = sizes
    dictionary = normal(generator, n, m).mul_(n**-0.5)
    active = soft_threshold_reference(normal(generator, batch, 1, m), 1.5).sign()
    # Squared norms of projections of a few units: in bfloat16 larger scores would be off by a whole one.
    codes = active * (4 + torch.rand(batch, tokens, m, generator=generator, device=generator.device)) * THRESHOLD
    signal = codes @ dictionary.mT + 0.1 * THRESHOLD * normal(generator, batch, tokens, n)
    upstream, others = [normal(generator, batch, tokens, m)], []
    if projects:  # the next projection, and the error of the reconstruction
        upstream += [normal(generator, batch, tokens, n), torch.tensor(0.5, device=generator.device)]
        others = [signal + 0.1 * normal(generator, batch, tokens, n)]
    # The largest singular value of such a matrix is close to 1 + sqrt(m / n).
    return Inputs([codes, signal, dictionary], upstream, others, step=1 / (1 + (m / n) ** 0.5) ** 2)


def _linear(generator: Generator, sizes: Sizes) -> Inputs:
    batch, tokens, n, m, _ = sizes
    weight = normal(generator, n, m).mul_(0.2 * n**-0.5)
    residual = normal(generator, batch, tokens, m)
    residual += residual.sign()  # rounding decides about no sign
    return Inputs([normal(generator, batch, tokens, n), weight, residual], [normal(generator, batch, tokens, m)], [])


def _depths(generator: Generator, sizes: Sizes) -> Inputs:
    clean = normal(generator, sizes.B, sizes.T, sizes.n)
    leaves = [clean + 0.3 * normal(generator, *clean.shape) for _ in range(sizes.depths)]
    weights = support.weights_of_depths(sizes.depths, generator.device)
    return Inputs(leaves, [torch.ones((), device=generator.device)], [clean, weights])


def _with_error(outputs: Sequence[Tensor], target: Tensor) -> list[Tensor]:
    return [*outputs[:2], (widened(outputs[1]) - widened(target)).square().sum()]


def _eager_layer(inputs: Inputs) -> list[Tensor]:
    outputs = unrolled_layer_reference(*inputs.leaves, step=inputs.step, threshold=THRESHOLD)
    return _with_error(outputs, inputs.others[0])


def _identity_layer(inputs: Inputs) -> list[Tensor]:
    codes, signal, dictionary = inputs.leaves
    codes = identity_step(codes, codes @ dictionary.mT, signal, dictionary, step=inputs.step, threshold=THRESHOLD)
    return _with_error([codes, codes @ dictionary.mT], inputs.others[0])


def _ours_layer(inputs: Inputs) -> list[Tensor]:
    options: dict[str, Any] = {"step": inputs.step, "threshold": THRESHOLD, "target": inputs.others[0]}
    return list(ops.unrolled_layer(*inputs.leaves, **options))  # type: ignore[arg-type]


def _eager_loss(inputs: Inputs) -> list[Tensor]:
    target, weights = inputs.others
    losses = layerwise_reconstruction_loss_reference([widened(one) for one in inputs.leaves], widened(target))
    return [(weights * losses).sum().to(target.dtype)]


def _ours_loss(inputs: Inputs) -> list[Tensor]:
    target, weights = inputs.others
    return [ops.layerwise_reconstruction_loss(inputs.leaves, target, depth_weights=weights)[0].to(target.dtype)]


def _both(*functions: Callable[..., Tensor], **options: Any) -> list[Apply]:
    """A formula and its op as functions of inputs."""
    return [lambda inputs, one=one: [one(*inputs.leaves, **options)] for one in functions]


WORKS = (
    Work("soft_threshold", "B T m", _codes, *_both(soft_threshold_reference, ops.soft_threshold, threshold=THRESHOLD)),
    Work(
        "lista_step",
        "B T n m",
        _layer,
        lambda inputs: [lista_step_reference(*inputs.leaves, step=inputs.step, threshold=THRESHOLD)],
        lambda inputs: [ops.lista_step(*inputs.leaves, step=inputs.step, threshold=THRESHOLD)],
    ),
    Work(
        "unrolled_layer",
        "B T n m",
        functools.partial(_layer, projects=True),
        _eager_layer,
        _ours_layer,
        {"eager by the identity": _identity_layer},
    ),
    Work("residual_linear", "B T n m", _linear, *_both(residual_linear_reference, ops.residual_linear)),
    Work("layerwise_reconstruction_loss", "B T n depths", _depths, _eager_loss, _ours_loss),
)
