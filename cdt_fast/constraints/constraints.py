"""Descent constraints: every layer must lower the loss, and multipliers turn that into weights of per-depth losses.

    min F(ℓ)   s.t.   g_l = ℓ_l − r_l ℓ_{l−1} ≤ 0  (l = 1..L),   g_0 = ℓ_0 − ε₀ ≤ 0,          r_l = 1 − α_l
    Lagrangian   F(ℓ) + Σ_l λ_l g_l = Σ_l w_l ℓ_l + constant

`formulation` has F and g, `duals` how λ moves, `feasibility` the verdict on held-out losses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from numbers import Real
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError, check_integer, check_number
from cdt_fast.constraints import presets
from cdt_fast.constraints.duals import DualVariables
from cdt_fast.constraints.feasibility import FeasibilityReport, judge
from cdt_fast.constraints.formulation import Descent, Objective, ResultBounds, Violations
from cdt_fast.constraints.presets import DEFAULTS, DescentOptions, options_of


class DescentConstraints(nn.Module):
    """The multipliers of the constraints on the losses of L+1 depths, and the rule that moves them.

    One training step (docs/constraints.md §2):

        weights = constraints.weights()                        # known before the forward
        total, per_depth = model.layer_losses(noisy, clean, depth_weights=weights)
        total.backward()
        constraints.record(per_depth, count)                   # once per micro-batch
        optimizer.step()
        constraints.step()                                     # moves the multipliers for the next step

    In a warm-up, call `step(update=False)`: the multipliers stay zero, and the weights are those of the objective.
    `epoch_end` restarts the slacks. None of these waits for the device.

    The module has no parameters; its state is in float64 buffers, so `to`, `state_dict` and `load_state_dict` are
    torch's own. Keep it beside the model and not inside it, where DistributedDataParallel would overwrite the sums of
    each rank and a cast would round them. The tensors that it exposes are live; clone what you want to keep.

    The objective F is minimized (docs/constraints.md §1):

        objective    F                        its weights
        "last"       ℓ_L                      (0, …, 0, 1)
        "depths"     Σ_l c_l ℓ_l              c_l
        "log"        Σ_l c_l log ℓ_l          c_l ā_L / ā_l           ā: an exponential average over about ten

    With r_l = 1 − α_l and the reference ε₀, the constraints of descent g_l ≤ 0 add to the weights

        coupling     g_l (l = 1..L)           to w_l (l < L)          to w_L
        "chain"      ℓ_l − r_l ℓ_{l−1}        λ_l − r_{l+1} λ_{l+1}   λ_L
        "detach"     the same                 λ_l                     λ_L        ℓ_{l−1} is a constant in the gradient
        "input"      the same                 λ_l; w_0 of "chain"     λ_L        ℓ_{l−1} too, but for ℓ_0
        "absolute"   ℓ_l − ε₀ ∏_{j≤l} r_j     λ_l                     λ_L

    and g_0 = ℓ_0 − ε₀ where there is a reference. With reference_mode="anchor" there is no g_0 and λ_0 = 0; under
    "chain" and "detach" g_1 = ℓ_1 − r_1 ε₀. One dual update, from the state before it (docs/constraints.md §3):

        ĝ = g,  or g_l / s_l with normalize=True              s_l = |ℓ_{l−1}|, or the size of the bound in its place
        e = ĝ − u  under "slack", ĝ − λ/β under "decay", else ĝ                                    β = slack_cost
        λ ← [λ + η e]₊, or Adam's step on e;      u ← [u − η_u (β u − λ)]₊  under "slack", η_u = 0.1 / β

    Both forms of resilience rest where ĝ = λ/β. A loss that is not finite, or a scale of zero, skips the whole update
    and adds one to `skipped_updates`.

    Args:
        layers: L, at least 1. There are L+1 losses: depth 0 is the input of layer 1.
        rate: α, one number for all layers or L of them, in [0, 1); None: no constraints of descent. Rates are for
            positive losses: a negative one may rise by α and still meet it.
        reference: ε₀, a positive number in units of the loss, "auto" or None. "auto" is the mean of ℓ_0 over the first
            20 steps with finite losses; the constraints that need it are off until then.
        objective: "last", "depths" or "log" (for positive losses).
        coefficients: c of "depths" and "log", L+1 numbers >= 0, not all zero; None: ones.
        bounds: bounds on single depths, `{depth: b}` for ℓ_depth ≤ b: a number, or a factor such as "1.01x" of the mean
            loss in the last ten steps of the warm-up. The multiplier of a bound is added to the weight of its depth.
        dual_lr: η. Adam moves a multiplier by about this much a step whatever the scale of the losses; ascent by this
            times the violation. None: 0.002 with Adam and the objective "last", else 0.05.
        betas: Adam's decay of the first and second moment; None: gradient ascent. Dual momentum overshoots.
        resilience: "slack", "decay" or None. Without it an infeasible problem sends λ to infinity.
        slack_cost: β, the cost of squared slack, β/2 ‖u‖²: the larger, the harder the constraints.
        coupling: "chain", "input", "detach" or "absolute"; "absolute" needs a reference.
        reference_mode: "constraint" (g_0) or "anchor"; "anchor" needs a reference.
        normalize: whether the dual step sees relative violations (for positive losses). With resilience the slack is
            relative then: the rest point is that of the raw problem with the cost β / s_l at layer l.
        margin: share, in [0, 1), by which the bounds of descent are lowered in training but not in `report`: a solution
            sits on its bounds, so held-out losses are a little above or below them.

    Attributes:
        options: the options, with a rate per layer and the dual rate that is used.
        depths: what reports call the depths, 0..L; to set where others of a model are read.

    InputError: an argument is outside its range.
    """

    def __init__(
        self,
        layers: int,
        rate: float | Sequence[float] | None = DEFAULTS.rate,
        reference: float | Literal["auto"] | None = DEFAULTS.reference,
        *,
        objective: presets.ObjectiveName = DEFAULTS.objective,
        coefficients: Sequence[float] | None = DEFAULTS.coefficients,
        bounds: Mapping[int, float | str] | None = DEFAULTS.bounds,
        dual_lr: float | None = DEFAULTS.dual_lr,
        betas: tuple[float, float] | None = DEFAULTS.betas,
        resilience: presets.Resilience | None = DEFAULTS.resilience,
        slack_cost: float = DEFAULTS.slack_cost,
        coupling: presets.Coupling = DEFAULTS.coupling,
        reference_mode: presets.ReferenceMode = DEFAULTS.reference_mode,
        normalize: bool = DEFAULTS.normalize,
        margin: float = DEFAULTS.margin,
    ) -> None:
        given = locals()
        super().__init__()
        options = DescentOptions(**{field.name: given[field.name] for field in fields(DescentOptions)})
        self.layers = check_integer("layers", layers, 1)
        self.depths = list(range(self.layers + 1))
        self.objective = Objective(self.layers, options)
        self.descent = Descent(self.layers, options)
        self.bounds = None if bounds is None else ResultBounds(self.layers, bounds)
        # One multiplier per depth for descent, and as many for bounds where there are any.
        self.duals = DualVariables((self.layers + 1) * (1 if self.bounds is None else 2), options)
        # The sums of the losses since the last step, then the count of their items.
        self.accumulated = nn.Buffer(torch.zeros(self.layers + 2, dtype=torch.float64))
        self._recorded = False
        used = {"rate": self.descent.rates, "reference": self.descent.reference, "dual_lr": self.duals.dual_lr}
        self.options = replace(options, **used)
        self.register_load_state_dict_pre_hook(self._check_settings)

    @classmethod
    def preset(cls, name: presets.Preset, layers: int, **overrides: Any) -> Self:
        """Build the constraints of a named setting; `overrides` are options of the constructor that replace its own.

        "video", "text" and "lm" are the defaults of `cdt-fast train` in these tasks; "paper-dust" and the others are
        the constraints of a row of the paper, whose warm-up is one epoch; "safe" is for a new problem: no depth is ever
        pushed up, no dual momentum, decay. InputError: there is no such preset or option, or a value is not valid.
        """
        return cls(layers, **options_of(name, **overrides))

    @property
    def multipliers(self) -> Tensor:
        """λ of descent, (L+1,), live. Entry 0 belongs to the reference constraint."""
        return self.duals.state[0, : self.layers + 1]

    @property
    def slacks(self) -> Tensor:
        """u of descent, (L+1,), live, in the units of ĝ; zero unless resilience is "slack"."""
        return self.duals.state[1, : self.layers + 1]

    @property
    def bound_multipliers(self) -> Tensor | None:
        """The multipliers of `bounds`, (L+1,), live; None without bounds."""
        return None if self.bounds is None else self.duals.state[0, self.layers + 1 :]

    @property
    def skipped_updates(self) -> Tensor:
        """The number of dual updates that a non-finite loss skipped, a scalar int64 tensor, live."""
        return self.duals.skipped_updates

    @property
    def reference_level(self) -> Tensor:
        """ε₀, a scalar tensor: NaN without a reference, the running mean so far while "auto" is not fixed."""
        return self.descent.reference_level

    @property
    def any(self) -> bool:
        """Return whether there is a constraint, in force or not yet."""
        return bool(self.descent.exists.any()) or self.bounds is not None

    @property
    def needs_warmup(self) -> bool:
        """Return whether a bound is a factor of the losses of a warm-up yet to come; it waits for the device."""
        return self.bounds is not None and self.bounds.average is not None and not self.bounds.average.count

    @property
    def device(self) -> torch.device:
        """Return the device of the multipliers, where the losses must be."""
        return self.accumulated.device

    @torch.no_grad()
    def weights(self) -> Tensor:
        """Return w, (L+1,), a new tensor outside autograd: 𝓛 = Σ_l w_l ℓ_l + constant for the current multipliers.

        w_l may be negative under "chain", and is an exact zero where nothing asks for that depth.
        """
        weights = self.objective.weights() + self.descent.weights(self.multipliers)
        return weights if self.bound_multipliers is None else weights + self.bound_multipliers

    def objective_weights(self) -> tuple[float, ...] | None:
        """Return the weights in a warm-up as numbers, with which depths of weight zero cost no backward; None for
        "log", whose weights follow the losses."""
        return None if self.objective.average is not None else self.objective.numbers

    @torch.no_grad()
    def record(self, losses: Tensor, count: float | Tensor) -> None:
        """Add the losses of one micro-batch to what `step` sees: the mean over the items of all of them and all ranks.

        Args:
            losses: the mean loss over the items of the micro-batch at each depth, (L+1,).
            count: the number of those items (tokens, patches, windows), a number >= 0 or a tensor of one element. A
                rank without items for this step records a count of zero; its losses are ignored.

        InputError: a shape, the count or a device is wrong.
        """
        if not isinstance(losses, Tensor) or losses.shape != (self.layers + 1,):
            given = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise InputError(f"losses is {given}; expected a tensor of shape ({self.layers + 1},), a mean per depth")
        if isinstance(count, Tensor) and count.numel() != 1:
            raise InputError(f"count has shape {tuple(count.shape)}; expected one element, the number of items")
        if losses.device != self.device:
            raise InputError(f"losses is on {losses.device}; expected {self.device}: move the constraints with .to(…)")
        sums = self.accumulated
        # The mean of nothing may be NaN.
        if isinstance(count, Tensor):
            count = count.reshape(()).to(sums.dtype)
            sums[:-1].add_(torch.where(count > 0, losses.to(sums.dtype) * count, 0.0))
        elif check_number("count", count, "a number >= 0", lambda number: number >= 0):
            sums[:-1].add_(losses.to(sums.dtype) * count)  # inductor keeps an `alpha` of its first call
        sums[-1].add_(count)
        self._recorded = True

    @torch.no_grad()
    def step(self, update: bool = True) -> None:
        """End a step: move the multipliers once, by everything recorded since the last call.

        With update=False, in a warm-up, only an automatic reference and the averages move. Where torch.distributed is
        initialized, every rank must call this: sums and counts, L+2 numbers, are all-reduced on the default group, and
        g is formed once from the result, so that it is exact. InputError: nothing was recorded since the last step.
        """
        if not self._recorded:
            raise InputError("nothing was recorded since the last step(); expected record(losses, count) before it")
        self._recorded = False
        reference, in_warmup = self.descent.measured, None if update or self.bounds is None else self.bounds.average
        averages = [average for average in (self.objective.average, in_warmup) if average is not None]
        if update or reference is not None or averages:
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(self.accumulated)
            losses = self.accumulated[:-1] / self.accumulated[-1]
            finite = losses.isfinite().all()
            if reference is not None:
                reference.update(losses[0], finite)
            for average in averages:
                average.update(losses, finite)
            if update:
                groups = self._violations(losses, self.options.margin)
                seen = [g.violation / g.scale if self.options.normalize else g.violation for g in groups]
                self.duals.update(torch.cat(seen), torch.cat([group.active for group in groups]), finite)
        self.accumulated.zero_()

    def epoch_end(self) -> None:
        """Restart the slacks at zero, so that each epoch enforces the constraints anew before they give way."""
        self.duals.state[1].zero_()

    @torch.no_grad()
    def report(self, losses: Tensor | Sequence[float]) -> FeasibilityReport:
        """Judge mean losses (L+1,), usually held-out ones; this waits for the device. InputError: not one a depth."""
        losses = self._as_losses(losses)
        chained = self.descent.uses_reference.logical_not().tolist()
        existing = int(self.descent.exists.sum()) + (0 if self.bounds is None else int(self.bounds.exists.sum()))
        return judge(losses, self._violations(losses), chained, self.options.rate, existing, self.depths)

    @torch.no_grad()
    def merit(self, losses: Tensor | Sequence[float], *, priced: bool = True) -> float:
        """Return F(ℓ) + β/2 Σ_l s_l [ĝ_l]₊², by which models are compared: lower is better. This waits for the device.

        It is the objective of the resilient problem, whose minimum the training seeks: at its rest u = [ĝ]₊ = λ/β, so
        the price is that of the multipliers without their history. s is 1 where `normalize` is off. Bounds are those of
        `report`; priced=False leaves the price out. Compare only values of one moment: averages and references move.
        """
        losses = self._as_losses(losses)
        merit = self.objective.value(losses)
        for violation, scale, active in self._violations(losses) if priced else ():
            squared = violation.square() / scale if self.options.normalize else violation.square()
            merit += self.duals.slack_cost / 2 * torch.where(active & (violation > 0), squared, 0.0).sum()
        return float(merit)

    def _as_losses(self, losses: Tensor | Sequence[float]) -> Tensor:
        losses = torch.as_tensor(losses, dtype=self.accumulated.dtype, device=self.device)
        if losses.shape != (self.layers + 1,):
            raise InputError(f"losses has shape {tuple(losses.shape)}; expected ({self.layers + 1},), one a depth")
        return losses

    def _violations(self, losses: Tensor, margin: float = 0.0) -> list[Violations]:
        """Return those of descent, then those of bounds, if any: the order of the multipliers."""
        groups = [self.descent.violations(losses, margin)]
        return groups if self.bounds is None else [*groups, self.bounds.violations(losses)]

    def get_extra_state(self) -> dict[str, Any]:
        """Return what the buffers do not hold: layers and options, in words and numbers, and whether sums wait."""
        options = {field.name: _words(getattr(self.options, field.name)) for field in fields(self.options)}
        return {"layers": self.layers, **options, "recorded": self._recorded}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore whether sums wait; `_check_settings` has compared the rest."""
        self._recorded = state["recorded"]

    def _check_settings(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Refuse a state of other options before any of it is restored."""
        saved = state.get(f"{prefix}_extra_state", {})
        for name, here in self.get_extra_state().items():
            if name != "recorded" and saved.get(name) != here:
                expected = f"{here}, as constructed here"
                raise InputError(f"the saved state has {name} = {saved.get(name)}; expected {expected}")


def _words(value: Any) -> float | str | bool:
    if isinstance(value, Mapping):
        return ", ".join(f"{depth}: {_words(value[depth])}" for depth in sorted(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(repr(float(number)) for number in value)
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)  # of NumPy's number a saved state could not be loaded
    return "none" if value is None else value
