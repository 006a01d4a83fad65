"""The cross-entropy of all depths through one head, forward and backward, at the shapes of GPT2-small and Llama-8B.

No peer weights depths within a call: either each depth is a call, or the depths are concatenated, the losses of all
tokens asked for, and the weights put on those, as a user of such a function would write it. The inputs are the hidden
states `[N, d]` of L+1 depths and the head `[V, d]`, with gradients, and the targets `[N]`.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.bench.case import Case, Implementation, Step, Unavailable
from cdt_fast.bench.suites import support
from cdt_fast.bench.suites.support import Inputs, imported, normal, peer

# (hidden [N, d], head [V, d], targets [N], reduction "mean" or "none") → the loss, one number or [N].
Loss = Callable[..., Tensor]


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


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """Every shape in float32 and bfloat16."""
    for shape in SHAPES[size]:
        for dtype in ("float32", "bfloat16"):
            yield _case(shape, dtype, device, size)


def _case(shape: Shape, dtype: str, device: torch.device, size: str) -> Case:
    inputs = support.shared(lambda: make_inputs(shape, getattr(torch, dtype), device))
    peers: dict[str, Callable[[], Step]] = {"eager, flattened": lambda: flattened(eager, inputs())}
    if shape.model != CLASSIFIER:
        for name, compile in support.compilers(eager, device, size, autotune=size == "gpu").items():
            peers[name] = lambda compile=compile: a_depth_at_a_time(compile(), inputs())
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
        expected=lambda: a_depth_at_a_time(eager, inputs().to(support.formula_dtype(size)))(),
        tolerance=support.TOLERANCE[dtype],
        note=shape.note,
    )


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
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
    return Inputs([*hidden, head], [], [targets]).to(dtype)


def eager(hidden: Tensor, head: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """All logits at once in eager torch, the softmax in float32."""
    return torch.nn.functional.cross_entropy(support.widened(hidden @ head.mT), targets, reduction=reduction)


def torch_chunked(device: torch.device, dtype: str) -> Loss:
    """torch's own `linear_cross_entropy`, chunked as its `LinearCrossEntropyOptions()` decides."""
    # Looked up by name: the package supports versions of torch that lack both.
    chunked = getattr(torch.nn.functional, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if chunked is None or options is None:
        raise Unavailable(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    return lambda *given, reduction: chunked(*given, reduction=reduction, options=options())


def liger(device: torch.device, dtype: str) -> Loss:
    """Liger's fused linear cross-entropy, the head's gradient summed in float32. With reduction "none" it computes the
    logits again in the backward; in versions that do not, its gradients are wrong and it is not timed."""
    kind = imported("liger_kernel.transformers", device).LigerFusedLinearCrossEntropyLoss
    make = functools.partial(kind, accum_dtype=torch.float32)
    return lambda hidden, head, targets, reduction: make(reduction=reduction)(head, hidden, targets)


def cce(device: torch.device, dtype: str, *, filtered: bool) -> Loss:
    """Cut cross-entropy, whose logits never leave the chip; filtered, as by default: no gradients of small logits."""
    function = imported("cut_cross_entropy", device).linear_cross_entropy
    if dtype == "float32":
        raise Unavailable("CCE differentiates float16 and bfloat16 alone, not float32")
    return functools.partial(function, **({} if filtered else {"filter_eps": None}))


def quack(device: torch.device, dtype: str) -> Loss:
    """QuACK's chunked cross-entropy, which gives a mean or a sum, and no losses of single tokens."""
    return imported("quack.linear_cross_entropy", device).chunked_linear_cross_entropy


PEERS: dict[str, Callable[[torch.device, str], Loss]] = {
    "torch linear_cross_entropy": torch_chunked,
    "Liger": liger,
    "CCE": functools.partial(cce, filtered=True),
    "CCE without its filter": functools.partial(cce, filtered=False),
    "QuACK": quack,
}


def fused(inputs: Inputs) -> Step:
    """The package's own op."""
    *hidden, head = inputs.leaves
    weights = support.weights_of_depths(len(hidden), head.device)

    def step() -> list[Tensor]:
        total, losses = ops.layerwise_cross_entropy(hidden, head, *inputs.others, depth_weights=weights)
        return [losses, *torch.autograd.grad(total, inputs.leaves)]

    return step


def a_depth_at_a_time(loss: Loss, inputs: Inputs) -> Step:
    """Loss and gradients of one depth after the other, so that nothing of a depth is kept: the weights are known."""
    *every, head = inputs.leaves
    weights = support.weights_of_depths(len(every), head.device)

    def step() -> list[Tensor]:
        losses, of_hidden, of_head = [], [], torch.zeros(())
        for depth, hidden in enumerate(every):
            value = loss(hidden, head, *inputs.others, reduction="mean")
            gradient, more = torch.autograd.grad(weights[depth] * value, [hidden, head])
            of_head = of_head.add_(more) if depth else more
            of_hidden.append(gradient)
            losses.append(support.widened(value.detach()))
        return [torch.stack(losses), *of_hidden, of_head]

    return step


def flattened(loss: Loss, inputs: Inputs) -> Step:
    """One call for the tokens of all depths, one after the other."""
    *hidden, head = inputs.leaves
    weights = support.weights_of_depths(len(hidden), head.device)

    def step() -> list[Tensor]:
        targets = inputs.others[0].repeat(len(hidden))
        each = loss(torch.cat(hidden), head, targets, reduction="none")
        losses = each.view(len(hidden), -1).float().mean(1)
        return [losses.detach(), *torch.autograd.grad(losses, inputs.leaves, weights)]

    return step
