"""The whole training step of a model: forward, backward, optimizer and multipliers, as the training loop takes it.

The implementations of a case differ in nothing but how they compute the losses of the depths. Beside the constrained
step against eager torch and its compiler stands the constrained step of `cdt_fast` against its own unconstrained one,
which reads the last depth alone: what the constraints cost.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast import DescentConstraints, ops
from cdt_fast.bench.case import Case, Implementation, Step, Unavailable
from cdt_fast.bench.suites.support import compiled, modes, name_of_mode, peer
from cdt_fast.models import DUST, VideoUT
from cdt_fast.ops.common import LayerNonlinearity, cpu_has_bf16_products, shrink_reference
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss_reference
from cdt_fast.ops.unrolled_layer import unrolled_layer_reference
from cdt_fast.training import optimizer as training

Weights = Tensor | Sequence[float]  # of the depths; numbers if the host knows them
Formula = Callable[[DUST, Tensor, Tensor], Tensor]  # the losses `[L+1]` of a model for noisy and clean tokens
Losses = Callable[[DUST, Tensor, Tensor, Weights], tuple[Tensor, Tensor]]  # the same as `(total, per_depth)`

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

    @property
    def title(self) -> str:
        return f"{self.family} {'tied' if self.tied else f'untied, {self.readout} readout'}"

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
    sequences, toy = {"toy": 4, "cpu": 400, "gpu": 3200}[size], TOY if size == "toy" else {}
    reference = Work("DUST", sequences, **toy)
    next_readout = {**toy, "tied": False, "readout": "next"}
    untied = Work("DUST", sequences, **next_readout), Work("DUST", sequences, **toy, tied=False)
    for work in (reference, *untied, Work("VideoUT", sequences, **toy), Work("VideoUT", sequences, **next_readout)):
        for dtype in ("float32", "bfloat16"):
            # At toy size compiling takes far longer than all else together.
            compilers = modes(device) if work is reference and size != "toy" else ()
            yield against_eager(work, device, dtype, compilers)
            yield against_unconstrained(work, device, dtype)


def against_eager(work: Work, device: torch.device, dtype: str, compilers: Sequence[str]) -> Case:
    """The step by eager torch, by torch.compile in these modes, and by `cdt_fast`."""

    def prepare(losses: Losses, dtype: str = dtype) -> Callable[[], Step]:
        return lambda: prepared(work, losses, device, dtype)

    def prepare_compiled(mode: str) -> Step:
        return prepared(work, weighted(compiled(written_out_losses, mode, device)), device, dtype)

    eager, note = weighted(written_out_losses), ""
    baselines = [Implementation("eager", "eager", prepare(eager))]
    if dtype == "bfloat16" and device.type == "cpu":  # a CPU is trained in float32 unless somebody chooses otherwise
        baselines = [Implementation("eager, float32", "eager", prepare(eager, "float32"))]
        baselines.append(Implementation("eager, bfloat16", "peer", prepare(eager)))
        note = "eager is in float32, all else in bfloat16"
    identity = weighted(functools.partial(written_out_losses, identity=True))
    implementations = [
        *baselines,
        Implementation("eager by the identity", "peer", prepare(identity)),
        *(peer(name_of_mode(mode), functools.partial(prepare_compiled, mode)) for mode in compilers),
        Implementation("cdt_fast", "ours", prepare(fused)),
    ]
    return _case(work, device, dtype, f"constrained, {dtype}", implementations, note)


def against_unconstrained(work: Work, device: torch.device, dtype: str) -> Case:
    """The constrained step of `cdt_fast` against its unconstrained one."""

    def one(name: str, role: str, losses: Losses, constrained: bool) -> Implementation:
        expected = functools.partial(first_step, work, device, constrained)
        return Implementation(name, role, lambda: prepared(work, losses, device, dtype, constrained), expected)

    implementations = one("unconstrained", "eager", last, False), one("constrained", "ours", fused, True)
    note = "all by cdt_fast; each agrees with the formula of its own loss"
    return _case(work, device, dtype, f"constrained against unconstrained, {dtype}", implementations, note)


def _case(
    work: Work, device: torch.device, dtype: str, title: str, implementations: Sequence[Implementation], note: str
) -> Case:
    return Case(
        suite="step",
        name=f"{work.title}, {title}",
        shape={"B": work.sequences, "T": work.window, "n": work.patch, "m": work.code, "L": work.layers},
        dtype=dtype,
        implementations=tuple(implementations),
        expected=lambda: first_step(work, device),
        tolerance=TOLERANCE[dtype],
        note=note,
    )


# Losses


def fused(model: DUST, noisy: Tensor, clean: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """The model's own losses, of all depths."""
    return model.layer_losses(noisy, clean, weights)  # type: ignore[return-value]


def last(model: DUST, noisy: Tensor, clean: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """The loss of the last depth, as a training without constraints computes it."""
    return ops.layerwise_reconstruction_loss([model(noisy)], clean, depth_weights=weights[-1:])


def weighted(formula: Formula) -> Losses:
    """The losses of all depths and their weighted sum; if the host knows the weights, the last depth alone counts."""

    def run(model: DUST, noisy: Tensor, clean: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        per_depth = formula(model, noisy, clean)
        if not isinstance(weights, Tensor):
            return per_depth[-1], per_depth[-1:].detach()
        return (weights.to(per_depth) * per_depth).sum(), per_depth.detach()

    return run


def written_out_losses(model: DUST, noisy: Tensor, clean: Tensor, identity: bool = False) -> Tensor:
    """The losses `[L+1]` of a model with analysis codes and "own" or "next" readouts, as everyone would write them
    first: each layer from its codes alone, in four large products.

    With `identity`, D (A H) = A Z, a layer reuses the projection that reads the depth before it: two large products a
    layer, what torch alone can do once the identity is known.
    """
    whole = model.dictionary
    dictionaries: list[Tensor] = [whole for _ in range(model.layers)] if model.tied else list(whole.unbind())
    readouts = [*dictionaries, dictionaries[-1]] if model.readout == "next" else [dictionaries[0], *dictionaries]
    codes = model.step * noisy @ dictionaries[0]
    reconstructions = [codes @ readouts[0].mT]
    options: dict[str, Any] = {"step": model.step, "threshold": model.threshold, "scale": model.scale}
    options["nonlinearity"] = model.nonlinearity
    for dictionary, before, readout in zip(dictionaries, readouts, readouts[1:], strict=False):
        if identity:
            # An untied model that reads with its own dictionary has read the depth before with another one.
            projection = reconstructions[-1] if before is dictionary else codes @ dictionary.mT
            codes = identity_step(codes, projection, noisy, dictionary, **options)
            reconstructions.append(codes @ readout.mT)
        else:
            layer = unrolled_layer_reference(codes, noisy, dictionary, **options, next_dictionary=readout)
            codes = layer[0]
            reconstructions.append(layer[1])
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


# The step


class TrainingStep:
    """Takes one training step a call; returns the losses that it reads, then the gradients of the parameters.

    The rates of optimizer and multipliers are so small that every step is the first one again.

    Args:
        work, losses, device: what is trained, how, and where.
        constrained: whether the multipliers give the weights of all depths; else the last depth alone is read.
        dtype: of parameters and tokens.
        autocast: whether the losses are computed under bfloat16 autocast.
    """

    def __init__(
        self,
        work: Work,
        losses: Losses,
        device: torch.device,
        constrained: bool = True,
        dtype: torch.dtype = torch.float32,
        autocast: bool = False,
    ) -> None:
        model, *self._batch = work.build(device, dtype)
        self._losses = _Losses(model, losses, autocast)
        # As in the loop: on a GPU every step updates as a captured one does.
        on_device = device.type != "cpu"
        optimizer, _ = training.build_optimizer(model.parameters(), 1e-12, lambda step: 1.0, on_device=on_device)
        constraints = constraints_under_way(work.layers, device) if constrained else None
        self._known = None if constrained else (*[0.0] * work.layers, 1.0)
        logged = torch.zeros(work.layers + 2 if constrained else 2, dtype=torch.float64, device=device)
        self._step = training.TrainingStep(self._losses, optimizer, logged, constraints)
        self._tokens = work.sequences * work.window

    def __call__(self) -> list[Tensor]:
        self._step.run([self._batch], [self._tokens], self._tokens, self._known, update=True)
        gradients = [parameter.grad for parameter in self._losses.parameters()]
        return [self._losses.per_depth, *(gradient for gradient in gradients if gradient is not None)]


class _Losses(nn.Module):
    """The losses of a model as the training step asks for them; keeps those of the last call."""

    per_depth: Tensor

    def __init__(self, model: DUST, losses: Losses, autocast: bool) -> None:
        super().__init__()
        self.model, self._compute, self._autocast = model, losses, autocast

    def forward(self, noisy: Tensor, clean: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        on = torch.autocast(noisy.device.type, torch.bfloat16) if self._autocast else contextlib.nullcontext()
        with on:
            total, per_depth = self._compute(self.model, noisy, clean, weights)
        self.per_depth = per_depth.detach()
        return total, self.per_depth


def constraints_under_way(layers: int, device: torch.device) -> DescentConstraints:
    """Constraints in the middle of a training: every depth has a weight, of either sign, and keeps it for long."""
    constraints = DescentConstraints(layers, 0.05, 20.0, dual_lr=1e-9).to(device)
    constraints.multipliers.copy_(0.4 + 0.1 * (torch.arange(layers + 1) % 3))
    return constraints


def prepared(work: Work, losses: Losses, device: torch.device, dtype: str, constrained: bool = True) -> TrainingStep:
    """The step as an implementation prepares it; `Unavailable` if the processor would emulate bfloat16."""
    autocast = dtype == "bfloat16"
    if autocast and device.type == "cpu" and not cpu_has_bf16_products():
        raise Unavailable("this processor has no instructions for bfloat16 products")
    return TrainingStep(work, losses, device, constrained, autocast=autocast)


# Several cases are held to the same step, which takes as long as all of a round.
@functools.lru_cache(maxsize=4)
def first_step(work: Work, device: torch.device, constrained: bool = True) -> list[Tensor]:
    """The step by the formula, in float64 if that is quick."""
    # In float64 a GPU of the consumer kind takes minutes and more memory than it has.
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    return TrainingStep(work, weighted(written_out_losses), device, constrained, dtype)()
