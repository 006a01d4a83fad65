"""The cross-entropy of all depths through one head, forward and backward, at the shapes of GPT2-small and Llama-8B."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.bench.baselines import cce, compiled, eager_cross_entropy, liger, torch_linear_cross_entropy
from cdt_fast.bench.baselines.depths import Depths, Loss, a_depth_at_a_time, all_depths_then_backward, flattened
from cdt_fast.bench.case import Case, Step, Way
from cdt_fast.bench.suites.inputs import TOLERANCE, Shared, formula_dtype, name_of, normal, peer, seeded
from cdt_fast.ops.layerwise_cross_entropy import layerwise_cross_entropy_reference


class Shape(NamedTuple):
    """L+1 depths of N tokens of width d, a vocabulary of V; what of it was scaled down."""

    model: str
    depths: int
    tokens: int
    width: int
    vocabulary: int
    note: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """By the names of the tables."""
        return {"depths": self.depths, "N": self.tokens, "d": self.width, "V": self.vocabulary}


# A head of a few classes, on the mean token of each text: the cost is that of the calls, not of the products.
CLASSIFIER = "classifier"
CLASSIFIERS = (
    (4, 64, 64, 2),
    (4, 64, 384, 2),
    (4, 64, 384, 32),
    (4, 256, 128, 10),
    (13, 256, 128, 64),
    (4, 4096, 384, 10),
)
SHAPES = {
    "toy": (Shape("toy", 3, 24, 16, 100), Shape(CLASSIFIER, 2, 8, 16, 2)),
    "cpu": (
        Shape("GPT2-small", 13, 256, 192, 12564, "scaled down from N 8,192, d 768, V 50,257"),
        Shape("Llama-8B", 33, 128, 256, 8016, "scaled down from N 2,048, d 4,096, V 128,256"),
        *(Shape(CLASSIFIER, *sizes) for sizes in CLASSIFIERS),
    ),
    "gpu": (
        Shape("GPT2-small", 13, 8192, 768, 50257),
        Shape("Llama-8B", 33, 2048, 4096, 128256),
        *(Shape(CLASSIFIER, 4, 256, 768, classes) for classes in (2, 32)),
    ),
}

KNOWN, UNKNOWN, SAMPLED = "weights known", "weights from the losses", "1/8 of the tokens on inner depths"
FRACTION = 1 / 8


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """Every shape in float32 and bfloat16: with the weights known before, with weights that follow, and sampled.

    A classifier's depths are neither sampled nor compiled: there is nothing to save.
    """
    for shape in SHAPES[size]:
        for dtype in (torch.float32, torch.bfloat16):
            if shape.model == CLASSIFIER:
                for work in (KNOWN, UNKNOWN):
                    yield case_of(shape, work, dtype, device, size)
                continue
            for work in (KNOWN, UNKNOWN, SAMPLED):
                # At toy size once: compiling takes longer than all the rest.
                compiles = size != "toy" or (work == KNOWN and dtype == torch.float32)
                modes = compiled.modes(device, autotune=size == "gpu") if compiles else ()
                yield case_of(shape, work, dtype, device, size, modes)
            yield _against_the_last_depth(shape, dtype, device, size)


def _against_the_last_depth(shape: Shape, dtype: torch.dtype, device: torch.device, size: str) -> Case:
    """What the inner depths, sampled, add to the loss of an unconstrained step; other work, so there is no floor."""
    inputs = Shared(lambda: make_inputs(shape, dtype, device))
    alone = Way(
        "the last depth alone",
        "eager",
        lambda: fused(last_alone(inputs()), KNOWN),
        expected=lambda: _formula(last_alone(inputs()), KNOWN, size)(),
    )
    return Case(
        suite="cross_entropy",
        name=f"layerwise cross-entropy, {SAMPLED}, against the last depth alone, {name_of(dtype)}, {shape.model}",
        shape=shape.sizes,
        dtype=name_of(dtype),
        ways=(alone, Way("all depths", "ours", lambda: fused(inputs(), SAMPLED))),
        expected=lambda: _formula(inputs(), SAMPLED, size)(),
        tolerance=TOLERANCE[dtype],
        note="; ".join(filter(None, ("both by cdt_fast", shape.note))),
    )


def case_of(
    shape: Shape, work: str, dtype: torch.dtype, device: torch.device, size: str, modes: tuple[str, ...] = ()
) -> Case:
    """The losses of all depths and their gradients in every way, of torch.compile in these modes."""
    inputs = Shared(lambda: make_inputs(shape, dtype, device))
    return Case(
        suite="cross_entropy",
        name=f"layerwise cross-entropy, {work}, {name_of(dtype)}, {shape.model}: {shape.depths} depths, "
        f"N {shape.tokens}, d {shape.width}, V {shape.vocabulary}",
        shape=shape.sizes,
        dtype=name_of(dtype),
        ways=tuple(_ways(inputs, work, dtype, device, size, modes)),
        expected=lambda: _formula(inputs(), work, size)(),
        tolerance=TOLERANCE[dtype],
        flop=flop(shape, work),
        moved=moved(shape, dtype),
        note=shape.note,
        with_memory=shape.model != CLASSIFIER,  # less than what a system counts in
    )


def _ways(
    inputs: Shared[Depths], work: str, dtype: torch.dtype, device: torch.device, size: str, modes: tuple[str, ...]
) -> Iterator[Way]:
    def each(loss: Loss) -> Step:
        if work == UNKNOWN:
            return all_depths_then_backward(loss, inputs())
        return a_depth_at_a_time(loss, inputs(), draw_of(inputs(), work))

    def compiled_each(mode: str) -> Step:
        return compiled.first_run(each(compiled.compiled(eager_cross_entropy.loss, mode, device)))

    yield Way("eager, a depth at a time", "eager", lambda: each(eager_cross_entropy.loss))
    for mode in modes:
        yield Way(
            f"{compiled.name_of(mode)}, a depth at a time", "peer", lambda mode=mode: compiled_each(mode), late=True
        )
    peers: dict[str, Callable[[], Loss]] = {
        "torch linear_cross_entropy": torch_linear_cross_entropy.prepare,
        "Liger": lambda: liger.prepare(device),
        "CCE": lambda: cce.prepare(device, dtype, filtered=True),
        "CCE without its filter": lambda: cce.prepare(device, dtype, filtered=False),
    }
    for name, prepare in peers.items():
        yield peer(f"{name}, a depth at a time", lambda prepare=prepare: each(prepare()))
    if work != SAMPLED:
        yield peer("eager, flattened", lambda: flattened(eager_cross_entropy.loss, inputs()))
        for name, prepare in peers.items():
            yield peer(f"{name}, flattened", lambda prepare=prepare: flattened(prepare(), inputs()))
    yield Way("cdt_fast", "ours", lambda: fused(inputs(), work))


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Depths:
    """Hidden states that point to their targets the more the deeper, as trained ones do, plus noise.

    The last depth's loss is 2 to 3 nats: where all logits are alike, gradients of logits are so small that a way which
    leaves small ones out would be flattered.
    """
    generator = seeded(device)
    head = normal(generator, shape.vocabulary, shape.width).mul_(shape.width**-0.5)
    targets = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator, device=device)
    noise = 2.0
    certain = math.log(shape.vocabulary) + noise**2 / 2 - 2
    hidden = [
        normal(generator, shape.tokens, shape.width).mul_(noise).add_(head[targets], alpha=certain * share.item())
        for share in torch.linspace(0.5, 1.0, shape.depths)
    ]
    return Depths(
        hidden=[states.to(dtype).requires_grad_() for states in hidden],
        head=head.to(dtype).requires_grad_(),
        targets=targets,
        # None is zero: a depth that is switched off would be skipped by some of the ways.
        weights=torch.linspace(-0.5, 1.5, 2 * shape.depths, device=device)[1::2].contiguous(),
    )


def last_alone(depths: Depths) -> Depths:
    """The last depth, with weight 1: what a training without constraints computes."""
    return Depths(depths.hidden[-1:], depths.head, depths.targets, torch.ones_like(depths.weights[-1:]))


def draw_of(depths: Depths, work: str) -> Callable[[], Tensor | None]:
    """Draws the tokens of the inner depths where they are sampled: as the op does, anew in each step."""
    if work != SAMPLED:
        return lambda: None
    generator = torch.Generator(depths.targets.device)
    tokens = len(depths.targets)

    def draw() -> Tensor:
        # From the same seed in every step: the gate compares with a formula on the same tokens.
        order = torch.randperm(tokens, generator=generator.manual_seed(2), device=depths.targets.device)
        return order[: math.ceil(FRACTION * tokens)]

    return draw


def fused(depths: Depths, work: str) -> Step:
    """The package's own op."""
    leaves = [*depths.hidden, depths.head]
    generator = torch.Generator(depths.targets.device)

    def known() -> list[Tensor]:
        total, losses = ops.layerwise_cross_entropy(
            depths.hidden, depths.head, depths.targets, depth_weights=depths.weights
        )
        return [losses, *torch.autograd.grad(total, leaves)]

    def unknown() -> list[Tensor]:
        _, losses = ops.layerwise_cross_entropy(depths.hidden, depths.head, depths.targets)
        return [losses.detach(), *torch.autograd.grad(losses, leaves, depths.weights)]

    def sampled() -> list[Tensor]:
        total, losses = ops.layerwise_cross_entropy(
            depths.hidden,
            depths.head,
            depths.targets,
            depth_weights=depths.weights,
            inner_fraction=FRACTION,
            generator=generator.manual_seed(2),
        )
        return [losses, *torch.autograd.grad(total, leaves)]

    return {KNOWN: known, UNKNOWN: unknown, SAMPLED: sampled}[work]


def _formula(depths: Depths, work: str, size: str) -> Step:
    dtype = formula_dtype(size)
    wide = Depths(
        [states.detach().to(dtype).requires_grad_() for states in depths.hidden],
        depths.head.detach().to(dtype).requires_grad_(),
        depths.targets,
        depths.weights.to(dtype),
    )
    return a_depth_at_a_time(_formula_of_a_depth, wide, draw_of(depths, work))


def _formula_of_a_depth(hidden: Tensor, head: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return layerwise_cross_entropy_reference([hidden], head, targets, reduction=reduction)[0]


def flop(shape: Shape, work: str) -> float:
    """Of the products, at two a multiplication: logits, and the gradients of hidden states and head.

    Weights that follow from the losses need no more: what keeps the logits has them when the weights come.
    """
    rows = shape.depths * shape.tokens
    if work == SAMPLED:
        rows = shape.tokens + (shape.depths - 1) * math.ceil(FRACTION * shape.tokens)
    return 2.0 * rows * shape.width * shape.vocabulary * 3


def moved(shape: Shape, dtype: torch.dtype) -> float:
    """Bytes of the hidden states, the head and their gradients, and of the targets."""
    numbers = shape.depths * shape.tokens * shape.width + shape.vocabulary * shape.width
    return 2.0 * dtype.itemsize * numbers + torch.int64.itemsize * shape.tokens
