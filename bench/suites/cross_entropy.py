"""The cross-entropy of all depths through one head, forward and backward, at the shapes of GPT2-small and Llama-8B."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.bench.baselines import cross_entropy as others
from cdt_fast.bench.baselines.cross_entropy import Depths, Loss, a_depth_at_a_time, all_depths_then_backward, flattened
from cdt_fast.bench.baselines.support import compiled, modes
from cdt_fast.bench.case import Case, Implementation, Step
from cdt_fast.bench.suites.inputs import TOLERANCE, compilers, formula_dtype, name_of, normal, peer, seeded, shared
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
_CLASSIFIERS = [
    (4, 64, 64, 2),
    (4, 64, 384, 2),
    (4, 64, 384, 32),
    (4, 256, 128, 10),
    (13, 256, 128, 64),
    (4, 4096, 384, 10),
]
SHAPES = {
    "toy": (Shape("toy", 3, 24, 16, 100), Shape(CLASSIFIER, 2, 8, 16, 2)),
    "cpu": (
        Shape("GPT2-small", 13, 256, 192, 12564, "scaled down from N 8,192, d 768, V 50,257"),
        Shape("Llama-8B", 33, 128, 256, 8016, "scaled down from N 2,048, d 4,096, V 128,256"),
        *(Shape(CLASSIFIER, *sizes) for sizes in _CLASSIFIERS),
    ),
    "gpu": (
        Shape("GPT2-small", 13, 8192, 768, 50257),
        Shape("Llama-8B", 33, 2048, 4096, 128256),
        *(Shape(CLASSIFIER, 4, 256, 768, classes) for classes in (2, 32)),
    ),
}

KNOWN, UNKNOWN, SAMPLED = "weights known", "weights from the losses", "1/8 of the tokens on inner depths"
FRACTION = 1 / 8
ALL_ALIVE = "eager, the logits of all depths alive"


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """Every shape in float32 and bfloat16: with the weights known before, with weights that follow, and sampled; those
    of a classifier neither sampled nor compiled, as there is nothing to save."""
    for shape in SHAPES[size]:
        for dtype in (torch.float32, torch.bfloat16):
            classifies = shape.model == CLASSIFIER
            for work in (KNOWN, UNKNOWN) if classifies else (KNOWN, UNKNOWN, SAMPLED):
                # At toy size once: compiling takes longer than all the rest.
                compiles = not classifies and (size != "toy" or (work == KNOWN and dtype == torch.float32))
                yield case_of(shape, work, dtype, device, size, modes(device, size == "gpu") if compiles else ())
            if not classifies:
                yield _against_the_last_depth(shape, dtype, device, size)


def _against_the_last_depth(shape: Shape, dtype: torch.dtype, device: torch.device, size: str) -> Case:
    """What the inner depths, sampled, add to the loss of an unconstrained step; other work, so there is no floor."""
    inputs = shared(lambda: make_inputs(shape, dtype, device))

    def last() -> Depths:
        every = inputs()
        return Depths(every.hidden[-1:], every.head, every.targets, torch.ones_like(every.weights[-1:]))

    def formula() -> list[Tensor]:
        return _formula(last(), KNOWN, size)()

    alone = Implementation("the last depth alone", "eager", lambda: fused(last(), KNOWN), formula)
    return Case(
        suite="cross_entropy",
        name=f"layerwise cross-entropy, {SAMPLED}, against the last depth alone, {name_of(dtype)}, {shape.model}",
        shape=shape.sizes,
        dtype=name_of(dtype),
        implementations=(alone, Implementation("all depths", "ours", lambda: fused(inputs(), SAMPLED))),
        expected=lambda: _formula(inputs(), SAMPLED, size)(),
        tolerance=TOLERANCE[dtype],
        note="; ".join(filter(None, ("both by cdt_fast", shape.note))),
    )


def case_of(
    shape: Shape, work: str, dtype: torch.dtype, device: torch.device, size: str, modes: tuple[str, ...] = ()
) -> Case:
    """The losses of all depths and their gradients in every implementation, of torch.compile in these modes."""
    inputs = shared(lambda: make_inputs(shape, dtype, device))
    return Case(
        suite="cross_entropy",
        name=f"layerwise cross-entropy, {work}, {name_of(dtype)}, {shape.model}: {shape.depths} depths, "
        f"N {shape.tokens}, d {shape.width}, V {shape.vocabulary}",
        shape=shape.sizes,
        dtype=name_of(dtype),
        implementations=tuple(_implementations(inputs, work, dtype, device, modes)),
        expected=lambda: _formula(inputs(), work, size)(),
        tolerance=TOLERANCE[dtype],
        flop=flop(shape, work),
        moved=moved(shape, dtype),
        note=shape.note,
        with_memory=shape.model != CLASSIFIER,  # less than what a system counts in
    )


def _implementations(
    inputs: Callable[[], Depths], work: str, dtype: torch.dtype, device: torch.device, modes: tuple[str, ...]
) -> Iterator[Implementation]:
    def each(loss: Loss) -> Step:
        if work == UNKNOWN:
            return all_depths_then_backward(loss, inputs())
        return a_depth_at_a_time(loss, inputs(), draw_of(inputs(), work))

    yield Implementation("eager, a depth at a time", "eager", lambda: each(others.eager))
    yield from compilers(modes, lambda mode: each(compiled(others.eager, mode, device)), ", a depth at a time")
    if work == KNOWN:
        # What a training loop does that sums the losses of the depths: the baseline of the claim about memory.
        yield peer(ALL_ALIVE, lambda: all_depths_then_backward(others.eager, inputs()))
    for name, prepare in others.PEERS.items():
        yield peer(f"{name}, a depth at a time", lambda prepare=prepare: each(prepare(device, dtype)))
    if work != SAMPLED:
        yield peer("eager, flattened", lambda: flattened(others.eager, inputs()))
        for name, prepare in others.PEERS.items():
            yield peer(f"{name}, flattened", lambda prepare=prepare: flattened(prepare(device, dtype), inputs()))
    yield Implementation("cdt_fast", "ours", lambda: fused(inputs(), work))


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Depths:
    """Hidden states that point to their targets the more the deeper, as trained ones do, plus noise; the last depth's
    loss is 2 to 3 nats: where all logits are alike, to leave small gradients of logits out would be flattered."""
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
        # None is zero: a depth that is switched off would be skipped by some of the implementations.
        weights=torch.linspace(-0.5, 1.5, 2 * shape.depths, device=device)[1::2].contiguous(),
    )


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
    leaves, weights = [*depths.hidden, depths.head], depths.weights

    def step() -> list[Tensor]:
        options: dict[str, Any] = {} if work == UNKNOWN else {"depth_weights": weights}
        if work == SAMPLED:
            options |= {"inner_fraction": FRACTION, "generator": torch.Generator(depths.targets.device).manual_seed(2)}
        total, losses = ops.layerwise_cross_entropy(depths.hidden, depths.head, depths.targets, **options)
        outputs, upstream = (losses, weights) if work == UNKNOWN else (total, None)
        return [losses.detach(), *torch.autograd.grad(outputs, leaves, upstream)]

    return step


def _formula(depths: Depths, work: str, size: str) -> Step:
    dtype = formula_dtype(size)
    hidden = [states.detach().to(dtype).requires_grad_() for states in depths.hidden]
    head = depths.head.detach().to(dtype).requires_grad_()
    wide = Depths(hidden, head, depths.targets, depths.weights.to(dtype))

    def loss(hidden: Tensor, head: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return layerwise_cross_entropy_reference([hidden], head, targets)[0]

    return a_depth_at_a_time(loss, wide, draw_of(depths, work))


def flop(shape: Shape, work: str) -> float:
    """Of the products, at two a multiplication: logits, and the gradients of hidden states and head. Weights that
    follow from the losses need no more: what keeps the logits has them when the weights come."""
    rows = shape.depths * shape.tokens
    if work == SAMPLED:
        rows = shape.tokens + (shape.depths - 1) * math.ceil(FRACTION * shape.tokens)
    return 2.0 * rows * shape.width * shape.vocabulary * 3


def moved(shape: Shape, dtype: torch.dtype) -> float:
    """Bytes of the hidden states, the head and their gradients, and of the targets."""
    numbers = shape.depths * shape.tokens * shape.width + shape.vocabulary * shape.width
    return 2.0 * dtype.itemsize * numbers + torch.int64.itemsize * shape.tokens
