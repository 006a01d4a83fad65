"""One optimizer step as the training loop takes it, with losses that are computed in whichever implementation."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast import DescentConstraints
from cdt_fast.bench.baselines.support import require_gpu
from cdt_fast.bench.case import Unavailable
from cdt_fast.bench.suites.trained import Formula, Trained, Weights
from cdt_fast.constraints.presets import Coupling, ObjectiveName
from cdt_fast.ops.common import cpu_has_bf16_products
from cdt_fast.training import optimizer as training
from cdt_fast.training.cuda_graph import EAGER_CALLS, CapturedStep, CudaGraphs, Graphs

# The depths that a step reads: all of them with the weights of the multipliers; all of them, of which the last alone
# counts; or the last alone.
CONSTRAINED, LOGGED, LAST = "constrained", "logged", "last"
Form = tuple[ObjectiveName, Coupling]

# `(total, per_layer)` of a model for its inputs, targets and weights.
Losses = Callable[[Any, Tensor, Tensor, Weights], tuple[Tensor, Tensor]]


class TrainingStep:
    """Trains one step of `work` a call; returns the losses that it reads, then the gradients of the parameters.

    Args:
        work, losses, device: what is trained, how, and where.
        reads: `CONSTRAINED`, `LOGGED` or `LAST`.
        dtype: of parameters and tokens.
        autocast: whether the losses are computed under bfloat16 autocast.
        graphs: where the step is captured, which takes `EAGER_CALLS + 1` calls; None: each kernel is launched.
        form: objective and coupling of the constraints; None: their defaults.
    """

    def __init__(
        self,
        work: Trained,
        losses: Losses,
        device: torch.device,
        reads: str = CONSTRAINED,
        dtype: torch.dtype = torch.float32,
        autocast: bool = False,
        graphs: Graphs | None = None,
        form: Form | None = None,
    ) -> None:
        self._model, self._inputs, self._targets = work.build(device, dtype)
        self._initial = [parameter.detach().clone() for parameter in self._model.parameters()]
        self._losses = _Losses(self._model, losses, autocast, cached=graphs is None)
        # As in the loop: on a GPU every step updates as a captured one does.
        on_device = graphs is not None or device.type != "cpu"
        parameters = self._model.parameters()
        self._optimizer, _ = training.build_optimizer(parameters, 1e-4, lambda step: 1.0, on_device=on_device)
        self._constraints = constraints_under_way(work.layers, device, form) if reads == CONSTRAINED else None
        self._duals = copy.deepcopy(None if self._constraints is None else self._constraints.state_dict())
        self._count = work.items
        self._known = (*[0.0] * work.layers, 1.0) if self._constraints is None else None
        logged = torch.zeros(2 if reads == LAST else work.layers + 2, dtype=torch.float64, device=device)
        self._step = training.TrainingStep(self._losses, self._optimizer, logged, self._constraints)
        self._run = self._on if graphs is None else CapturedStep(self._on, graphs)

    @torch.no_grad()
    def restart(self) -> None:
        """Go back to the first step, in the same memory, which a captured step keeps reading and writing."""
        for parameter, initial in zip(self._model.parameters(), self._initial, strict=True):
            parameter.copy_(initial)
        for state in self._optimizer.state.values():
            for moment in state.values():
                moment.zero_()
        self._step.logged_sums.zero_()
        if self._constraints is not None and self._duals is not None:
            self._constraints.load_state_dict(self._duals)

    def __call__(self) -> list[Tensor]:
        self._run(self._inputs, self._targets)
        gradients = [parameter.grad for parameter in self._model.parameters()]
        return [self._losses.per_layer, *(gradient for gradient in gradients if gradient is not None)]

    def _on(self, inputs: Tensor, targets: Tensor) -> None:
        self._step.run([(inputs, targets)], [self._count], self._count, self._known, update=True)


class _Losses(nn.Module):
    """The losses of a model as the training step asks for them; keeps those of the last call."""

    per_layer: Tensor

    def __init__(self, model: nn.Module, losses: Losses, autocast: bool, cached: bool) -> None:
        super().__init__()
        self._model, self._told, self._autocast, self._cached = model, losses, autocast, cached

    def forward(self, inputs: Tensor, targets: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        context: Any = contextlib.nullcontext()
        if self._autocast:
            # Its cache is for those who launch each kernel: a copy of the weights must not outlive a capture.
            context = torch.autocast(inputs.device.type, torch.bfloat16, cache_enabled=self._cached)
        with context:
            total, per_layer = self._told(self._model, inputs, targets, weights)
        self.per_layer = per_layer.detach()
        return total, self.per_layer


def constraints_under_way(layers: int, device: torch.device, form: Form | None = None) -> DescentConstraints:
    """Constraints in the middle of a training: every depth has a weight, of either sign, and keeps it for long."""
    chosen: dict[str, Any] = {} if form is None else dict(zip(("objective", "coupling"), form, strict=True))
    constraints = DescentConstraints(layers, 0.05, 20.0, dual_lr=1e-5, **chosen).to(device)
    constraints.multipliers.copy_(0.4 + 0.1 * (torch.arange(layers + 1) % 3))
    return constraints


def fused(model: Any, inputs: Tensor, targets: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """The model's own losses, of all depths."""
    return model.layer_losses(inputs, targets, weights)


def weighted(formula: Formula) -> Losses:
    """A function of the losses of all depths `[L+1]`, as one of their weighted sum."""

    def run(model: Any, inputs: Tensor, targets: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        per_layer = formula(model, inputs, targets)
        if not isinstance(weights, Tensor):  # known to the host, which leaves out what counts nothing
            counted = [weight * loss for weight, loss in zip(weights, per_layer, strict=True) if weight]
            return torch.stack(counted).sum(), per_layer.detach()
        return (weights.to(per_layer) * per_layer).sum(), per_layer.detach()

    return run


def prepared(
    work: Trained, losses: Losses, device: torch.device, reads: str, autocast: bool, form: Form | None = None
) -> TrainingStep:
    """The step as an implementation prepares it."""
    refuse_slow_bf16(device, autocast)
    return TrainingStep(work, losses, device, reads, autocast=autocast, form=form)


def refuse_slow_bf16(device: torch.device, autocast: bool) -> None:
    """Raise `Unavailable` where bfloat16 is asked for on a processor that emulates it."""
    if autocast and device.type == "cpu" and not cpu_has_bf16_products():
        raise Unavailable("this processor has no instructions for bfloat16 products")


# Several cases are held to the same step, which takes as long as all of a round.
@functools.lru_cache(maxsize=4)
def first_step(work: Trained, device: torch.device, reads: str, form: Form | None = None) -> list[Tensor]:
    """The first step by the formula, in float64 where that is quick; what is read of one depth is read of all."""
    if reads == LAST:
        per_layer, *gradients = first_step(work, device, LOGGED, form)
        return [per_layer[-1:], *gradients]
    # In float64 a GPU of the consumer kind takes minutes and more memory than it has.
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    return TrainingStep(work, weighted(work.formula), device, reads, dtype, form=form)()


def graphs_of(device: torch.device) -> Graphs:
    """Where steps on `device` are captured; `Unavailable` but on an NVIDIA GPU."""
    require_gpu("a CUDA graph", device)
    return CudaGraphs(device)


def captured(work: Trained, losses: Losses, device: torch.device, autocast: bool, graphs: Graphs) -> TrainingStep:
    """A constrained step that has been captured: from its first call on it is replayed, beginning at the first step."""
    step = TrainingStep(work, losses, device, CONSTRAINED, autocast=autocast, graphs=graphs)
    for _ in range(EAGER_CALLS + 1):
        step()
    step.restart()
    return step
