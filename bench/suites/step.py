"""The whole training step of a model: forward, backward, optimizer and multipliers, as the training loop takes it.

The implementations of a case differ in nothing but how they compute the losses of the depths.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cdt_fast import DescentConstraints
from cdt_fast.bench.case import Case, Implementation, Step, Unavailable
from cdt_fast.bench.suites.support import compilers, peer
from cdt_fast.models import DUST, VideoUT
from cdt_fast.ops.common import LayerNonlinearity, shrink_reference
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss_reference
from cdt_fast.ops.products import cpu_has_bf16_products
from cdt_fast.ops.unrolled_layer import unrolled_layer_reference
from cdt_fast.training import optimizer as training

# Of a model, noisy and clean tokens and the weights of the depths: the weighted loss, and the losses `[L+1]`.
Losses = Callable[[DUST, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # relative difference from the formula that is rounding
TOY: dict[str, Any] = {"window": 5, "patch": 16, "code": 64, "layers": 2}


@dataclass(frozen=True)
class Work:
    """A model that denoises: `sequences` B of `window` T tokens, `patch` n numbers each; codes of width `code` m."""

    family: str
    sequences: int
    window: int = 20
    patch: int = 256
    code: int = 1024
    layers: int = 5
    tied: bool = True
    readout: str = "own"

    def build(self, device: torch.device, dtype: torch.dtype) -> tuple[DUST, Tensor, Tensor]:
        """The same model, noisy and clean tokens `[B, T, n]` on every device; the losses of its depths differ."""
        generator = torch.Generator().manual_seed(0)
        arguments: dict[str, Any] = {"tied": self.tied, "readout": self.readout}
        model = {"DUST": DUST, "VideoUT": VideoUT}[self.family](self.patch, self.code, self.layers, **arguments)
        with torch.no_grad():  # no two dictionaries alike, so that a gradient cannot land in the wrong one unseen
            model.dictionary += 0.01 * torch.randn(model.dictionary.shape, generator=generator)
        # Patches with some structure over time, so that attention and shrinkage have something to do.
        still = torch.rand(self.sequences, 1, self.patch, generator=generator)
        clean = still + 0.02 * torch.randn(self.sequences, self.window, self.patch, generator=generator)
        noisy = clean + 0.05 * torch.randn(clean.shape, generator=generator)
        return model.to(device, dtype), noisy.to(device, dtype), clean.to(device, dtype)


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """The steps of DUST and VideoUT, of which the first is also compiled."""
    sequences, toy = {"toy": 4, "demo": 100, "cpu": 400, "gpu": 3200}[size], TOY if size == "toy" else {}
    untied = {**toy, "tied": False}
    for number, work in enumerate(
        (
            Work("DUST", sequences, **toy),
            Work("DUST", sequences, **untied, readout="next"),
            Work("DUST", sequences, **untied),
            Work("VideoUT", sequences, **toy),
            Work("VideoUT", sequences, **untied, readout="next"),
        )
    ):
        for dtype in ("float32", "bfloat16"):
            yield _case(work, dtype, device, {} if number else compilers(written_out_losses, device, size))


def _case(work: Work, dtype: str, device: torch.device, compilers: dict[str, Callable[[], Any]]) -> Case:
    def prepare(losses: Losses, dtype: str = dtype) -> Step:
        autocast = dtype == "bfloat16"
        if autocast and device.type == "cpu" and not cpu_has_bf16_products():
            raise Unavailable("this processor has no instructions for bfloat16 products")
        return training_step(work, losses, device, autocast=autocast)

    eager, note = weighted(written_out_losses), ""
    baselines = [Implementation("eager", "eager", lambda: prepare(eager))]
    if dtype == "bfloat16" and device.type == "cpu":  # eager torch on a CPU is in float32 unless somebody asks
        baselines = [Implementation("eager, float32", "eager", lambda: prepare(eager, "float32"))]
        baselines.append(Implementation("eager, bfloat16", "peer", lambda: prepare(eager)))
        note = "eager is in float32, all else in bfloat16"
    identity = weighted(functools.partial(written_out_losses, identity=True))
    # In float64 a GPU of the consumer kind takes minutes and more memory than it has.
    wide = torch.float64 if device.type == "cpu" else torch.float32
    return Case(
        suite="step",
        name=f"{work.family} {'tied' if work.tied else f'untied, {work.readout} readout'}, constrained, {dtype}",
        shape={"B": work.sequences, "T": work.window, "n": work.patch, "m": work.code, "L": work.layers},
        dtype=dtype,
        implementations=(
            *baselines,
            Implementation("eager by the identity", "peer", lambda: prepare(identity)),
            *(peer(name, lambda make=make: prepare(weighted(make()))) for name, make in compilers.items()),
            Implementation("cdt_fast", "ours", lambda: prepare(DUST.layer_losses)),
        ),
        expected=lambda: training_step(work, eager, device, wide)(),
        tolerance=TOLERANCE[dtype],
        note=note,
    )


def training_step(
    work: Work, losses: Losses, device: torch.device, dtype: torch.dtype = torch.float32, autocast: bool = False
) -> Step:
    """One constrained training step a call; returns the losses that it reads, then the gradients of the parameters.

    Rates are so small that every step is the first one again. `autocast`: the losses are formed in bfloat16 autocast.
    """
    model, *batch = work.build(device, dtype)
    on_device = device.type != "cpu"  # as in the loop: on a GPU every step updates as a captured one does
    optimizer = training.build_optimizer(model.parameters(), 1e-12, on_device=on_device)
    constraints = DescentConstraints(work.layers, 0.05, 20.0, dual_lr=1e-9).to(device)
    # In the middle of a training: every depth has a weight, of either sign.
    constraints.multipliers.copy_(0.4 + 0.1 * (torch.arange(work.layers + 1) % 3))
    logged = torch.zeros(work.layers + 2, dtype=torch.float64, device=device)
    found: list[Tensor] = []

    def compute(noisy: Tensor, clean: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            total, per_depth = losses(model, noisy, clean, weights)
        found[:] = [per_depth.detach()]
        return total, found[0]

    step = training.TrainingStep(compute, optimizer, logged, constraints)  # type: ignore[arg-type]
    tokens = work.sequences * work.window

    def run() -> list[Tensor]:
        step.run([batch], [tokens], None, update=True)
        return [*found, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    return run


def weighted(formula: Callable[[DUST, Tensor, Tensor], Tensor]) -> Losses:
    """The losses of all depths that a formula gives, and their weighted sum."""

    def run(model: DUST, noisy: Tensor, clean: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        per_depth = formula(model, noisy, clean)
        return (weights.to(per_depth) * per_depth).sum(), per_depth

    return run


def written_out_losses(model: DUST, noisy: Tensor, clean: Tensor, identity: bool = False) -> Tensor:
    """The losses `[L+1]` of a model as everyone would write them first: each layer from its codes alone, in four large
    products. With `identity`, D (A H) = A Z, a layer reuses the projection that reads the depth before it: in two."""
    dictionaries: list[Tensor] = [model.dictionary] * model.layers if model.tied else [*model.dictionary.unbind()]
    readouts = [*dictionaries, dictionaries[-1]] if model.readout == "next" else [dictionaries[0], *dictionaries]
    codes = model.step * noisy @ dictionaries[0]
    reconstructions = [codes @ readouts[0].mT]
    options: dict[str, Any] = {"step": model.step, "threshold": model.threshold, "scale": model.scale}
    options["nonlinearity"] = model.NONLINEARITY
    for dictionary, before, readout in zip(dictionaries, readouts, readouts[1:], strict=False):
        if identity:
            # An untied model that reads with its own dictionary has read the depth before with another one.
            projection = reconstructions[-1] if before is dictionary else codes @ dictionary.mT
            codes = identity_step(codes, projection, noisy, dictionary, **options)
            read = codes @ readout.mT
        else:
            codes, read = unrolled_layer_reference(codes, noisy, dictionary, **options, next_dictionary=readout)
        reconstructions.append(read)
    return layerwise_reconstruction_loss_reference(reconstructions, clean)


def identity_step(
    codes: Tensor,
    projection: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    scale: float = 1.0,
    nonlinearity: LayerNonlinearity = "soft_threshold",
) -> Tensor:
    """The next codes `[B, T, m]` of a layer from its codes, their projection `[B, T, n]` and the signal."""
    attention = torch.softmax(scale * projection @ projection.mT, -1)
    update = attention @ codes + step * (signal - attention @ projection) @ dictionary
    return shrink_reference(update, threshold, nonlinearity)
