"""The whole training step of a model: forward, backward, optimiser and multipliers.

The ways of a case differ in nothing but how they compute the per-depth losses. Beside the constrained step against
eager torch and its compiler stands the constrained step of `cdt_fast` against its own unconstrained one, which reads
and scores the last depth alone: what the constraints cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from cdt_fast import DescentConstraints, ops
from cdt_fast.bench.baselines.compiled import compiled, first_run, modes, name_of
from cdt_fast.bench.baselines.identity import identity_losses
from cdt_fast.bench.baselines.written_out import written_out_losses
from cdt_fast.bench.case import Case, Step, Unavailable, Way
from cdt_fast.bench.machine import cpu_has_bf16_products
from cdt_fast.models import DUST, VideoUT

TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}

# The depths that a step reads: all of them with the weights of the multipliers; all of them, of which the last alone
# counts; or the last alone.
CONSTRAINED, LOGGED, LAST = "constrained", "logged", "last"

# `(total, per_layer)` of a model for its inputs, targets and weights.
Losses = Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Trained(Protocol):
    """What a step trains: a model with inputs and targets, L, and how many items a loss is a mean over."""

    @property
    def layers(self) -> int: ...

    @property
    def items(self) -> int: ...

    def build(self, device: torch.device, dtype: torch.dtype = ...) -> tuple[Any, Tensor, Tensor]:
        """Model, inputs and targets; the same whatever the device."""
        ...


@dataclass(frozen=True)
class Work:
    """What is trained on video.

    Attributes:
        family: "DUST" or "VideoUT".
        tied, readout: as the model's arguments.
        sequences, window: B and T.
        patch, code: n and m.
        layers: L.
    """

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
        """Model and readout in words."""
        return f"{self.family} {'tied' if self.tied else f'untied, {self.readout} readout'}"

    @property
    def shape(self) -> dict[str, int]:
        """The sizes by the names of the formulas."""
        return {"B": self.sequences, "T": self.window, "n": self.patch, "m": self.code, "L": self.layers}

    @property
    def items(self) -> int:
        """What a loss is a mean over."""
        return self.sequences * self.window

    @property
    def flop(self) -> float:
        """Of forward and backward by the identity, without forming H_0: products of tokens with the dictionary, the
        small ones of the attention, and the n by n map of the first depth."""
        tokens = self.sequences * self.window
        # An untied model that reads with its own dictionaries projects the codes between layers on two of them.
        large = 6 * self.layers + (0 if self.tied or self.readout == "next" else 3 * (self.layers - 1))
        attention = 5 * self.layers * self.patch + 3 * (self.layers - 1) * self.code
        return 2.0 * tokens * (large * self.patch * self.code + self.window * attention + 2 * self.patch**2)

    def moved(self, dtype: str) -> float:
        """Bytes of what each layer reads and writes once, forward and backward: codes, projections, signals and their
        gradients."""
        tokens = self.sequences * self.window
        return float(getattr(torch, dtype).itemsize * tokens * (6 * self.code + 10 * self.patch) * self.layers)

    def build(self, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[DUST, Tensor, Tensor]:
        """The same model, noisy and clean tokens `[B, T, n]` whatever the device; the losses of its depths differ."""
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


class TrainingStep:
    """Trains one step a call; returns the losses it reads, then the gradients of the parameters.

    Args:
        work: what is trained.
        losses: how its losses are computed.
        device: where.
        reads: `CONSTRAINED`, `LOGGED` or `LAST`.
        dtype: of parameters and tokens.
        autocast: whether the losses are computed under bfloat16 autocast.
    """

    def __init__(
        self,
        work: Trained,
        losses: Losses,
        device: torch.device,
        reads: str = CONSTRAINED,
        dtype: torch.dtype = torch.float32,
        autocast: bool = False,
    ) -> None:
        self._model, self._inputs, self._targets = work.build(device, dtype)
        self._losses, self._device, self._autocast = losses, device, autocast
        self._initial = [parameter.detach().clone() for parameter in self._model.parameters()]
        self._last = torch.eye(work.layers + 1, device=device)[-1]
        self._reads, self._layers = reads, work.layers
        self._count = work.items
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Go back to the first step, in the same memory."""
        for parameter, initial in zip(self._model.parameters(), self._initial, strict=True):
            parameter.copy_(initial)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        constrained = self._reads == CONSTRAINED
        self._constraints = constraints_under_way(self._layers, self._device) if constrained else None

    def __call__(self) -> list[Tensor]:
        weights = self._last if self._constraints is None else self._constraints.weights()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._device.type, torch.bfloat16) if self._autocast else nullcontext():
            total, per_layer = self._losses(self._model, self._inputs, self._targets, weights)
        total.backward()
        self._optimizer.step()
        if self._constraints is not None:
            self._constraints.record(per_layer.to(torch.float64) * self._count, self._count)
            self._constraints.step()
        gradients = [parameter.grad for parameter in self._model.parameters()]
        return [per_layer.detach(), *(gradient for gradient in gradients if gradient is not None)]


def constraints_under_way(layers: int, device: torch.device) -> DescentConstraints:
    """Constraints in the middle of a training: every depth has a weight, of either sign, and keeps it for long."""
    constraints = DescentConstraints(layers, 0.05, 20.0, dual_lr=1e-5, device=device)
    constraints.multipliers.copy_(0.4 + 0.1 * (torch.arange(layers + 1) % 3))
    return constraints


def fused(model: DUST, noisy: Tensor, clean: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The model's own losses, of all depths."""
    return model.layer_losses(noisy, clean, weights)


def fused_last(model: DUST, noisy: Tensor, clean: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of the last depth, as a training without constraints would compute it."""
    return ops.layerwise_reconstruction_loss([model(noisy)], clean, layer_weights=weights[-1:])


def weighted(losses: Callable[[Any, Tensor, Tensor], Tensor]) -> Losses:
    """A function of the losses of all depths `[L+1]`, as one of their weighted sum."""

    def run(model: Any, inputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        per_layer = losses(model, inputs, targets)
        return (weights.to(per_layer) * per_layer).sum(), per_layer.detach()

    return run


def last_only(losses: Losses) -> Losses:
    """The same, telling the loss of the last depth alone."""

    def run(model: Any, inputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        total, per_layer = losses(model, inputs, targets, weights)
        return total, per_layer[-1:]

    return run


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """The steps of DUST, VideoUT and TextUT."""
    for work in _works(size):
        reference = work.family == "DUST" and work.tied
        for dtype in TOLERANCES:
            yield against_eager(work, device, dtype, CONSTRAINED, compilers=reference, toy=size == "toy")
            if reference:
                yield against_eager(work, device, dtype, LOGGED)
            yield against_unconstrained(work, device, dtype)
    from cdt_fast.bench.suites.text_step import text_cases  # it is made of what is here

    yield from text_cases(device, size)


def _works(size: str) -> Iterator[Work]:
    sequences = {"toy": 4, "cpu": 400, "gpu": 3200}[size]
    small: dict[str, Any] = {"window": 5, "patch": 16, "code": 64, "layers": 2} if size == "toy" else {}
    for family in ("DUST", "VideoUT"):
        work = Work(family, sequences, **small)
        yield work
        yield replace(work, tied=False, readout="next")
        if family == "DUST":
            yield replace(work, tied=False)


def against_eager(
    work: Work, device: torch.device, dtype: str, reads: str, compilers: bool = False, toy: bool = False
) -> Case:
    """The step by eager torch, its compilers where asked for, and `cdt_fast`."""
    autocast = dtype == "bfloat16"

    def way(name: str, role: str, losses: Losses, autocast: bool = autocast) -> Way:
        return Way(name, role, prepared(work, losses, device, reads, autocast))

    def compiled_way(mode: str) -> Way:
        def prepare() -> Step:
            if toy:
                raise Unavailable("at toy size it would take far longer to compile than all else together")
            losses = weighted(compiled(written_out_losses, mode, device))
            step = prepared(work, losses, device, reads, autocast)()
            run = first_run(step)
            step.restart()
            return run

        return Way(name_of(mode), "peer", prepare)

    ways = [
        way("eager", "eager", weighted(written_out_losses)),
        way("eager by the identity", "peer", weighted(identity_losses)),
        *(compiled_way(mode) for mode in modes(device) if compilers),
        way("cdt_fast", "ours", fused),
    ]
    note = ""
    if autocast and device.type == "cpu":
        # Whoever has no fused step trains in float32 on a CPU: that is the step to compare with.
        ways[0] = replace(ways[0], name="eager, bfloat16", role="peer")
        ways.insert(0, way("eager, float32", "eager", weighted(written_out_losses), autocast=False))
        note = "eager is in float32, all else in bfloat16"
    return _case(
        work, device, dtype, f"{work.title}, {'constrained' if reads == CONSTRAINED else 'unconstrained'}", tuple(ways),
        reads=reads, note=note,
    )  # fmt: skip


def against_unconstrained(work: Work, device: torch.device, dtype: str) -> Case:
    """The constrained step of `cdt_fast` against its unconstrained one."""
    autocast = dtype == "bfloat16"

    def way(name: str, role: str, losses: Losses, reads: str, expected: Losses) -> Way:
        return Way(
            name, role, prepared(work, losses, device, reads, autocast), expected_of(work, device, reads, expected)
        )

    every = weighted(written_out_losses)
    ways = (
        way("unconstrained", "eager", fused_last, LAST, last_only(every)),
        way("unconstrained, all depths logged", "peer", fused, LOGGED, every),
        way("constrained", "ours", fused, CONSTRAINED, every),
    )
    return _case(
        work, device, dtype, f"{work.title}, constrained against unconstrained", ways, reads=CONSTRAINED,
        note="all three by cdt_fast; each agrees with the formula of its own loss",
    )  # fmt: skip


def _case(
    work: Work, device: torch.device, dtype: str, title: str, ways: tuple[Way, ...], reads: str, note: str
) -> Case:
    return Case(
        suite="step",
        name=f"{title}, {dtype}",
        shape=work.shape,
        dtype=dtype,
        ways=ways,
        expected=expected_of(work, device, reads, weighted(written_out_losses)),
        tolerance=TOLERANCES[dtype],
        flop=work.flop,
        moved=work.moved(dtype),
        note=note,
    )


def prepared(
    work: Trained, losses: Losses, device: torch.device, reads: str, autocast: bool
) -> Callable[[], TrainingStep]:
    """The step as a way prepares it."""

    def prepare() -> TrainingStep:
        if autocast and device.type == "cpu" and not cpu_has_bf16_products():
            raise Unavailable("this processor has no instructions for bfloat16 products")
        return TrainingStep(work, losses, device, reads, autocast=autocast)

    return prepare


def expected_of(work: Trained, device: torch.device, reads: str, losses: Losses) -> Step:
    """The first step by the formula, in float64 where that is quick."""
    # In float64 a GPU of the consumer kind takes minutes and more memory than it has.
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    return lambda: TrainingStep(work, losses, device, reads, dtype)()
