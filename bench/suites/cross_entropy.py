"""The cross-entropy of all depths through one head, forward and backward, at the shapes of GPT2-small and Llama-8B.

No peer weights depths within a call: either each depth is a call, or the depths are concatenated, the losses of all
tokens asked for, and the weights put on those, as a user of such a function would write it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.bench.case import Case, Implementation, Step, Unavailable
from cdt_fast.bench.suites import support
from cdt_fast.bench.suites.support import compiled, imported, normal, peer
from cdt_fast.ops.layerwise_cross_entropy import layerwise_cross_entropy_reference

# (hidden [N, d], head [V, d], targets [N], "mean" or "none") → the loss, one number or [N].
Loss = Callable[[Tensor, Tensor, Tensor, str], Tensor]


class Shape(NamedTuple):
    """L+1 depths of N tokens of width d, a vocabulary of V; what of it was scaled down."""

    model: str
    depths: int
    tokens: int
    width: int
    vocabulary: int
    note: str = ""


# A head of a few classes, on the mean token of each text: the cost is that of the calls, not of the products.
CLASSIFIER = "classifier"
SHAPES = {
    "toy": (Shape("toy", 3, 24, 16, 100), Shape(CLASSIFIER, 2, 8, 16, 2)),
    "cpu": (
        Shape("GPT2-small", 13, 256, 192, 12564, "scaled down from N 8,192, d 768, V 50,257"),
        Shape("Llama-8B", 33, 128, 256, 8016, "scaled down from N 2,048, d 4,096, V 128,256"),
        *(Shape(CLASSIFIER, *sizes) for sizes in ((4, 64, 64, 2), (13, 256, 128, 64), (4, 4096, 384, 10))),
    ),
    "gpu": (
        Shape("GPT2-small", 13, 8192, 768, 50257),
        Shape("Llama-8B", 33, 2048, 4096, 128256),
        Shape(CLASSIFIER, 4, 256, 768, 32),
    ),
}


@dataclass
class Depths:
    """What a layerwise cross-entropy reads."""

    hidden: list[Tensor]  # `[N, d]` each, L+1 of them, with gradients
    head: Tensor  # `[V, d]`, with a gradient
    targets: Tensor  # `[N]` int64
    weights: Tensor  # `[L+1]` float32


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """Every shape in float32 and bfloat16; those of a classifier not compiled."""
    for shape in SHAPES[size]:
        for dtype in ("float32", "bfloat16"):
            # At toy size once: compiling takes longer than all the rest.
            compiles = (size != "toy" or dtype == "float32") and shape.model != CLASSIFIER
            yield case_of(shape, dtype, device, size, support.modes(device, size == "gpu") if compiles else ())


def case_of(shape: Shape, dtype: str, device: torch.device, size: str, modes: tuple[str, ...]) -> Case:
    """The losses of all depths and their gradients in every implementation, of torch.compile in these modes."""
    inputs = support.shared(lambda: make_inputs(shape, getattr(torch, dtype), device))
    peers: dict[str, Callable[[], Step]] = {
        support.name_of_mode(mode): lambda mode=mode: a_depth_at_a_time(compiled(eager, mode, device), inputs())
        for mode in modes
    }
    # What a training loop does that sums the losses of the depths.
    peers["eager, the logits of all depths alive"] = lambda: all_depths_then_backward(eager, inputs())
    peers["eager, flattened"] = lambda: flattened(eager, inputs())
    for name, make in PEERS.items():
        peers[f"{name}, a depth at a time"] = lambda make=make: a_depth_at_a_time(make(device, dtype), inputs())
        peers[f"{name}, flattened"] = lambda make=make: flattened(make(device, dtype), inputs())
    return Case(
        suite="cross_entropy",
        name=f"layerwise cross-entropy, weights known, {dtype}, {shape.model}: {shape.depths} depths, "
        f"N {shape.tokens}, d {shape.width}, V {shape.vocabulary}",
        shape={"depths": shape.depths, "N": shape.tokens, "d": shape.width, "V": shape.vocabulary},
        dtype=dtype,
        implementations=(
            Implementation("eager, a depth at a time", "eager", lambda: a_depth_at_a_time(eager, inputs())),
            *(peer(name, prepare) for name, prepare in peers.items()),
            Implementation("cdt_fast", "ours", lambda: fused(inputs())),
        ),
        expected=lambda: formula(inputs(), support.formula_dtype(size))(),
        tolerance=support.TOLERANCE[dtype],
        note=shape.note,
        with_memory=shape.model != CLASSIFIER,  # less than what a system counts in
    )


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Depths:
    """Hidden states that point to their targets the more the deeper, as trained ones do, plus noise; the last depth's
    loss is 2 to 3 nats: if all logits were alike, to leave small gradients of logits out would be flattered."""
    generator = support.seeded(device)
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


# Losses of one depth


def eager(hidden: Tensor, head: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """All logits at once in eager torch, the softmax in float32."""
    return torch.nn.functional.cross_entropy((hidden @ head.mT).float(), targets, reduction=reduction)


def torch_chunked(device: torch.device, dtype: str) -> Loss:
    """torch's own `linear_cross_entropy`, chunked as its `LinearCrossEntropyOptions()` decides."""
    # Looked up by name: the package supports versions of torch that lack both.
    chunked = getattr(torch.nn.functional, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if chunked is None or options is None:
        raise Unavailable(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    return lambda hidden, head, targets, reduction: chunked(
        hidden, head, targets, reduction=reduction, options=options()
    )


def liger(device: torch.device, dtype: str) -> Loss:
    """Liger's fused linear cross-entropy, the head's gradient summed in float32.

    With reduction "none" it computes the logits again in the backward (and in versions that do not, its gradients are
    wrong and it is not timed).
    """
    kind = imported("liger_kernel.transformers", device).LigerFusedLinearCrossEntropyLoss
    options = {"accum_dtype": torch.float32}
    return lambda hidden, head, targets, reduction: kind(reduction=reduction, **options)(head, hidden, targets)


def cce(device: torch.device, dtype: str, *, filtered: bool) -> Loss:
    """Cut cross-entropy, whose logits never leave the chip; filtered: gradients of small logits are left out, as is its
    default."""
    function = imported("cut_cross_entropy", device).linear_cross_entropy
    if dtype == "float32":
        raise Unavailable("CCE differentiates float16 and bfloat16 alone, not float32")
    options = {} if filtered else {"filter_eps": None}
    return lambda hidden, head, targets, reduction: function(hidden, head, targets, reduction=reduction, **options)


def quack(device: torch.device, dtype: str) -> Loss:
    """QuACK's chunked cross-entropy, which gives a mean or a sum, and no losses of single tokens."""
    function = imported("quack.linear_cross_entropy", device).chunked_linear_cross_entropy
    return lambda hidden, head, targets, reduction: function(hidden, head, targets, reduction=reduction)


PEERS: dict[str, Callable[[torch.device, str], Loss]] = {
    "torch linear_cross_entropy": torch_chunked,
    "Liger": liger,
    "CCE": functools.partial(cce, filtered=True),
    "CCE without its filter": functools.partial(cce, filtered=False),
    "QuACK": quack,
}


# Weighted losses of all depths


def fused(depths: Depths) -> Step:
    """The package's own op."""

    def step() -> list[Tensor]:
        given = depths.hidden, depths.head, depths.targets
        total, losses = ops.layerwise_cross_entropy(*given, depth_weights=depths.weights)
        return [losses, *torch.autograd.grad(total, [*depths.hidden, depths.head])]

    return step


def a_depth_at_a_time(loss: Loss, depths: Depths) -> Step:
    """Loss and gradients of one depth after the other, so that nothing of a depth is kept: the weights are known."""

    def step() -> list[Tensor]:
        losses, of_hidden, of_head = [], [], torch.zeros(())
        for depth, hidden in enumerate(depths.hidden):
            value = loss(hidden, depths.head, depths.targets, "mean")
            gradient, more = torch.autograd.grad(depths.weights[depth] * value, [hidden, depths.head])
            of_head = of_head.add_(more) if depth else more
            of_hidden.append(gradient)
            losses.append(value.detach().float())
        return [torch.stack(losses), *of_hidden, of_head]

    return step


def all_depths_then_backward(loss: Loss, depths: Depths) -> Step:
    """All losses before any gradient."""

    def step() -> list[Tensor]:
        losses = torch.stack([loss(hidden, depths.head, depths.targets, "mean").float() for hidden in depths.hidden])
        gradients = torch.autograd.grad(losses, [*depths.hidden, depths.head], depths.weights)
        return [losses.detach(), *gradients]

    return step


def flattened(loss: Loss, depths: Depths) -> Step:
    """One call for the tokens of all depths, one after the other."""

    def step() -> list[Tensor]:
        count = len(depths.hidden)
        each = loss(torch.cat(depths.hidden), depths.head, depths.targets.repeat(count), "none")
        losses = each.view(count, -1).float().mean(1)
        gradients = torch.autograd.grad(losses, [*depths.hidden, depths.head], depths.weights)
        return [losses.detach(), *gradients]

    return step


def formula(depths: Depths, dtype: torch.dtype) -> Step:
    """The reference in another dtype."""
    hidden = [states.detach().to(dtype).requires_grad_() for states in depths.hidden]
    head = depths.head.detach().to(dtype).requires_grad_()

    def loss(hidden: Tensor, head: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return layerwise_cross_entropy_reference([hidden], head, targets)[0]

    return a_depth_at_a_time(loss, Depths(hidden, head, depths.targets, depths.weights.to(dtype)))
