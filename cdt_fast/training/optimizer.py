"""The constraints and the optimizer of a run, and a step in which the host never waits for the device."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from cdt_fast.checks import InputError
from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.constraints.presets import DEFAULTS, bounds_by_position
from cdt_fast.training.settings import RunSettings

LARGEST_GRADIENT_NORM = 1.0
_PLACEMENT = ("foreach", "fused", "capturable", "lr")  # what may differ between two machines of one run


def build_constraints(settings: RunSettings, layers: int, largest_reference: float | None = None) -> DescentConstraints:
    """Build what the settings describe, on the CPU; InputError: they do not fit each other or the number of layers.

    A reference that is a number is at most `largest_reference`, the loss of a guess: else layer 1 could raise the loss.
    """
    chosen, taps = settings.constraints, getattr(settings.model, "taps", None)
    options = {name: getattr(chosen, name) for name in asdict(DEFAULTS) if hasattr(chosen, name)}
    options |= {"objective": settings.objective, "coefficients": settings.coefficients}
    if chosen.bounds is not None and taps is not None:
        options["bounds"] = bounds_by_position(chosen.bounds, taps)
    if largest_reference is not None and isinstance(chosen.reference, float):
        options["reference"] = min(chosen.reference, largest_reference)
    constraints = DescentConstraints(layers, **options)
    constraints.depths = taps or constraints.depths
    if settings.constrained and not chosen.warmup_epochs and constraints.needs_warmup:
        factor = "a factor of the loss at the end of the warm-up"
        raise InputError(f"[constraints] bounds holds {factor}, but warmup_epochs is 0: give it a warm-up")
    return constraints


def build_optimizer(parameters: Iterable[Any], lr: float, *, on_device: bool) -> AdamW:
    """Build Adam; InputError: the rate is beyond what an update in float32 can be made with. Parameters may come in
    groups `{"params": …, "factor": …}`, with factors of the learning rate. `on_device` keeps it and the count of steps
    on the parameters' device, for a step that a CUDA graph captures."""
    if lr > 1e30:
        raise InputError(f"[training] lr must be at most 1e+30, got {lr:g}")
    trained = list(parameters)
    optimizer = AdamW(trained, lr=lr, weight_decay=0.0, fused=True, capturable=on_device)  # a third of the passes
    for group in optimizer.param_groups if on_device else ():
        group["lr"] = torch.tensor(lr, dtype=torch.float32, device=group["params"][0].device)
    return optimizer


def set_rate(optimizer: AdamW, lr: float) -> None:
    """Set the learning rate of the next step; one on a device is written into the tensor that a kernel reads."""
    for group in optimizer.param_groups:
        own = lr * group.get("factor", 1.0)
        group["lr"] = group["lr"].fill_(own) if isinstance(group["lr"], Tensor) else own


def load_optimizer_state(optimizer: AdamW, state: Mapping[str, Any]) -> None:
    """Load what `optimizer.state_dict()` returned, there or on another device; rate and placement stay as built."""
    own = [{name: group[name] for name in _PLACEMENT} for group in optimizer.param_groups]
    groups = [{**saved, **kept} for saved, kept in zip(state["param_groups"], own, strict=True)]
    optimizer.load_state_dict({**state, "param_groups": groups})


@dataclass(frozen=True)
class TrainingStep:
    """One optimizer step: forward, backward, clipping, update, sums for the log, duals. Nothing here waits for the
    device, nor changes anything on the host."""

    losses: nn.Module  # of `(*batch, weights)`: `(total, per_depth)`
    optimizer: Optimizer
    logged_sums: Tensor  # `[L+2]`, the sums of the losses and the count since the last log; added to in place
    constraints: DescentConstraints | None  # give the weights of the losses; None: unconstrained

    def run(
        self, batches: Iterable[Sequence[Tensor]], counts: Sequence[int], known: Sequence[float] | None, update: bool
    ) -> None:
        """Take the step on the tensors of micro-batches, whose losses are means over `counts` items (tokens, texts).
        `known` are the weights of the depths if the host knows them: a depth of weight 0 then costs no backward. None:
        those of the constraints. `update` moves the multipliers: not in a warm-up, nor without constraints."""
        weights = self.constraints.weights() if known is None and self.constraints is not None else known
        self.optimizer.zero_grad(set_to_none=True)
        for batch, count in zip(batches, counts, strict=True):
            total, per_depth = self.losses(*batch, weights)
            share = count / sum(counts)
            (total if share == 1 else total * share).backward()
            self.logged_sums[:-1].add_(per_depth, alpha=count)
            self.logged_sums[-1].add_(count)
            if self.constraints is not None:
                self.constraints.record(per_depth, count)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        _clip_gradients([parameter for parameter in parameters if parameter.grad is not None])
        self.optimizer.step()
        if self.constraints is not None:
            self.constraints.step(update)


def _clip_gradients(parameters: Sequence[Tensor]) -> None:
    if parameters and all(each.device.type == "cpu" for each in parameters):
        # By rows: torch's norm of a million numbers in float32 on a CPU is off by up to 2.5e-4.
        rows = [torch.linalg.vector_norm(each.grad, dim=-1).flatten() for each in parameters]  # type: ignore[arg-type]
        norm = torch.linalg.vector_norm(torch.cat(rows))
        nn.utils.clip_grads_with_norm_(parameters, LARGEST_GRADIENT_NORM, norm)
    else:
        nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT_NORM)
