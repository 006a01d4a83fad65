"""Descent constraints: every layer must lower the loss, and multipliers turn that into weights of per-depth losses.

    min F(ℓ)   s.t.   g_l = ℓ_l − r_l ℓ_{l−1} ≤ 0  (l = 1..L),   g_0 = ℓ_0 − ε₀ ≤ 0,          r_l = 1 − α_l
    Lagrangian   F(ℓ) + Σ_l λ_l g_l = Σ_l w_l ℓ_l + constant

One step of training (docs/constraints.md §2):

    weights = constraints.weights()                        # known before the forward
    total, per_depth = model.layer_losses(noisy, clean, depth_weights=weights)
    total.backward()
    constraints.record(per_depth, count)                   # once a micro-batch
    optimizer.step()
    constraints.step()                                     # the multipliers move for the next step

The parts: `objective` (F), `coupling` (g), `bounds` (results as bounds), `measurement` (what is recorded), `rules` and
`duals` (how λ moves), `feasibility` (the verdict). Each holds what it needs of the options: `settings`, plain words and
numbers of a saved state; `constants`, tensors that move to the device with the state; `tensors`, the state itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor

from cdt_fast.checks import check_choice, check_integer, check_non_negative
from cdt_fast.constraints.bounds import ResultBounds
from cdt_fast.constraints.coupling import DescentCoupling
from cdt_fast.constraints.duals import DualAction, DualVariables
from cdt_fast.constraints.feasibility import FeasibilityReport, Group, judge
from cdt_fast.constraints.measurement import Measurement, check_record
from cdt_fast.constraints.objective import Objective
from cdt_fast.constraints.presets import (
    DEFAULTS,
    REFERENCE_MEASUREMENTS,
    Coupling,
    DescentOptions,
    Dual,
    ObjectiveName,
    Preset,
    ReferenceMode,
    Resilience,
    options_of,
)
from cdt_fast.constraints.saved_state import check_state
from cdt_fast.errors import InputError

# What a saved state holds besides settings and tensors.
_COUNTERS = ("steps", "window_steps", "unstepped_records")


class DescentConstraints:
    """The multipliers of the constraints on the losses of L+1 depths, and the rule that moves them.

    What is minimized is the objective F (docs/constraints.md §1):

        objective    F                        its weights
        "last"       ℓ_L                      (0, …, 0, 1)
        "depths"     Σ_l c_l ℓ_l              c_l
        "log"        Σ_l c_l log ℓ_l          c_l ā_L / ā_l           ā: the average over the last ten measurements

    Let r_l = 1 − α_l, and ε₀ the reference. The constraints of descent g_l ≤ 0 add to the weights

        coupling     g_l (l = 1..L)           to w_l (l < L)          to w_L
        "chain"      ℓ_l − r_l ℓ_{l−1}        λ_l − r_{l+1} λ_{l+1}   λ_L
        "detach"     the same                 λ_l                     λ_L        ℓ_{l−1} is a constant in the gradient
        "absolute"   ℓ_l − ε₀ ∏_{j≤l} r_j     λ_l                     λ_L

    with g_0 = ℓ_0 − ε₀ when there is a reference. With reference_mode="anchor" there is no g_0, g_1 = ℓ_1 − r_1 ε₀
    under "chain" and "detach", and λ_0 = 0. Without a reference λ_0 stays 0. λ and the slacks u start at 0.

    One dual update, from the losses recorded since the last one. All of it reads the state from before the step
    (as the primal step does: it used the λ from before), then all of it is written (docs/constraints.md §3):

        ĝ = g,  or g_l / |ℓ_{l−1}| with normalize=True
        e = ĝ − u  under "slack", else ĝ;        κ = 1/β  under "decay", else 0;        β = slack_cost
        λ ← [rule(λ, e, κλ)]₊                    rule: see `cdt_fast.constraints.rules`
        u ← [u − slack_lr (β u − λ)]₊            under "slack"

    Both forms of resilience rest where ĝ = λ/β; the slack form gets there with u = λ/β. The decay is part of the
    gradient that Adam normalizes: decoupled decay (AdamW) rests elsewhere.

    normalize=True divides each violation by its scale s_l = |ℓ_{l−1}| (|ε₀| where the bound is the reference or
    comes from an anchor, |ε₀ ∏ r| under "absolute", |b_k| of a bound), in the dual step only: raw violations shrink
    geometrically with depth. The Lagrangian and its weights stay those of the raw constraints, so without resilience
    the solution is the same. With resilience the slack is then relative, a fraction of s_l: the rest point is
    g_l = s_l λ_l / β, that of the raw problem with the cost β / s_l at layer l.

    A non-finite loss (or a scale of zero under normalize) skips the whole dual update, on the device, and adds one to
    `skipped_updates`; multipliers, slacks and the state of the rule stay as they were.

    The tensors it exposes are live: they change in place and keep their storage from step to step (only `to`, or
    the move to the device of the first recorded losses, replaces them). Clone what you want to keep.
    `weights`, `record` and `step` never wait for the device.

    Args:
        layers: L, at least 1. There are L+1 losses: depth 0 is the input of layer 1.
        rate: α, one number for all layers or L of them, in [0, 1); None: no constraints of descent.
        reference: ε₀, a positive number in units of the loss, "auto" or None. "auto" takes the mean of ℓ_0 over the
            first 20 measurements (`presets.REFERENCE_MEASUREMENTS`): every step during the warm-up, every dual update
            after it, those with a non-finite loss left out. The constraints that need ε₀ become active with the 20th.
        objective: "last", "depths" or "log"; for losses that are positive.
        coefficients: c of "depths" and "log", L+1 numbers >= 0, not all zero; None: ones.
        bounds: results that chosen depths are to reach, `{depth: b}` with ℓ_depth ≤ b: a number, or a factor such as
            "1.01x" of `reference_losses` at that depth. The multiplier of a bound is added to the weight of its depth.
        reference_losses: L+1 losses of a reference run; None: what the warm-up came to, averaged over its last ten
            steps.
        dual: "ascent" or "adam".
        dual_lr: step size of the multipliers. Adam moves a multiplier by about this much a step whatever the scale of
            the losses; ascent by this times the violation. None: 0.002 with "adam" and the objective "last", else 0.05.
        betas: Adam's decay of the first and second moment. The first is 0 because dual momentum overshoots.
        resilience: "slack", "decay" or None. Without it an infeasible problem sends λ to infinity.
        slack_cost: β, what a unit of squared slack costs, β/2 ‖u‖²: the larger, the harder the constraints.
        slack_lr: step size of the slacks; None: 0.1 / slack_cost.
        coupling: "chain", "detach" or "absolute"; "absolute" needs a reference.
        reference_mode: "constraint" (g_0) or "anchor"; "anchor" needs a reference.
        normalize: whether the dual step sees relative violations; for losses that are positive.
        margin: share, in [0, 1), by which every bound of descent is lowered while training:
            g_l = ℓ_l − (1 − margin) r_l ℓ_{l−1}, and likewise for the reference. `report` judges by the bounds
            themselves. A solution sits on its bounds, and on held-out data a little above or below them; the margin is
            what keeps it below.
        warmup_steps: number of steps with the constraints off: the weights of the objective alone, no dual update.
        dual_every: number of steps per dual update. Their sums and counts add up; λ is constant meanwhile.
        device: where the state lives; None: where the first recorded losses are (the CPU until then).
        dtype: torch.float64 or torch.float32; float32 on a device without float64 (mps).

    Attributes:
        layers, reference, coupling, reference_mode, normalize, margin, warmup_steps, dual_every, dtype: as they were
            given.

    Raises:
        InputError: an argument is outside what is said above.
    """

    def __init__(
        self,
        layers: int,
        rate: float | Sequence[float] | None = DEFAULTS.rate,
        reference: float | Literal["auto"] | None = DEFAULTS.reference,
        *,
        objective: ObjectiveName = DEFAULTS.objective,
        coefficients: Sequence[float] | None = DEFAULTS.coefficients,
        bounds: Mapping[int, float | str] | None = DEFAULTS.bounds,
        reference_losses: Sequence[float] | None = DEFAULTS.reference_losses,
        dual: Dual = DEFAULTS.dual,
        dual_lr: float | None = DEFAULTS.dual_lr,
        betas: tuple[float, float] = DEFAULTS.betas,
        resilience: Resilience | None = DEFAULTS.resilience,
        slack_cost: float = DEFAULTS.slack_cost,
        slack_lr: float | None = DEFAULTS.slack_lr,
        coupling: Coupling = DEFAULTS.coupling,
        reference_mode: ReferenceMode = DEFAULTS.reference_mode,
        normalize: bool = DEFAULTS.normalize,
        margin: float = DEFAULTS.margin,
        warmup_steps: int = DEFAULTS.warmup_steps,
        dual_every: int = DEFAULTS.dual_every,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        given = locals()
        options = DescentOptions(**{field.name: given[field.name] for field in fields(DescentOptions)})
        self.layers = check_integer("layers", layers, 1)
        self.normalize = bool(normalize)
        self.warmup_steps = check_integer("warmup_steps", warmup_steps, 0)
        self.dual_every = check_integer("dual_every", dual_every, 1)
        self.dtype = check_choice("dtype", dtype, (torch.float32, torch.float64))
        self._objective = Objective(objective, coefficients, self.layers, dtype)
        self._coupling = DescentCoupling(self.layers, options, dtype)
        self.coupling, self.reference_mode = coupling, reference_mode
        self.reference, self.margin = self._coupling.reference, self._coupling.margin
        self._bounds = ResultBounds(options, self.layers, dtype)
        self._measurement = Measurement(self.layers, dtype)
        # A multiplier a depth for descent, and as many for bounds where there are any.
        groups = 1 + self._bounds.any
        self._duals = DualVariables((self.layers + 1) * groups, options, dtype)
        self._steps = 0
        self._window_steps = 0
        self._unstepped_records = 0
        self._placed = False
        if device is not None:
            self.to(device)

    @classmethod
    def preset(
        cls,
        name: Preset,
        layers: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float64,
        **overrides: Any,
    ) -> DescentConstraints:
        """Build the constraints of a named setting, in which an option that the setting does not name has its default.

        Args:
            name: "video", "text" and "lm" are what `cdt-fast train` starts from in these tasks. "paper-dust",
                "paper-ut", "paper-vit", "paper-text-ut", "paper-encoder" and "paper-llama" are the constraints of a
                row of the paper (rate and ε₀ as tabled, Adam with its usual betas, slack, chain, raw violations, no
                margin). "safe" is meant for a new problem: no depth is ever pushed up, relative violations, no dual
                momentum, ε₀ from the first steps, decay.
            layers: L.
            device, dtype: as in the constructor.
            overrides: options of the constructor; they win over the preset. `warmup_steps` is among those to give:
                the paper warms up for one epoch.

        Raises:
            InputError: there is no such preset or option, or the value of an option is not valid.
        """
        return cls(layers, device=device, dtype=dtype, **options_of(name, **overrides))

    @property
    def multipliers(self) -> Tensor:
        """λ of descent, (L+1,), live. Entry 0 belongs to the reference constraint."""
        return self._groups(self._duals.tensors["multipliers"])[0]

    @property
    def slacks(self) -> Tensor:
        """u of descent, (L+1,), live, in the units of ĝ; zero unless resilience is "slack"."""
        return self._groups(self._duals.tensors["slacks"])[0]

    @property
    def bound_multipliers(self) -> Tensor | None:
        """The multipliers of `bounds`, (L+1,), live; None without bounds."""
        return self._groups(self._duals.tensors["multipliers"])[1] if self._bounds.any else None

    @property
    def reference_level(self) -> Tensor:
        """ε₀, a scalar tensor: NaN without a reference, the running mean so far while "auto" is not fixed."""
        return self._coupling.reference_level

    @property
    def rates(self) -> Tensor:
        """α, (L,); NaN without constraints of descent."""
        return self._coupling.rates

    @property
    def any(self) -> bool:
        """Whether there is a constraint, in force or not yet."""
        return bool(self._coupling.constants["exists"].any()) or self._bounds.any

    def steps_to_reference(self) -> int:
        """After how many steps the automatic reference of a constraint is fixed; 0 where no constraint has one."""
        if self.reference != "auto" or not self._coupling.referring.any():
            return 0
        after_warmup = (REFERENCE_MEASUREMENTS - self.warmup_steps) * self.dual_every
        return max(REFERENCE_MEASUREMENTS, self.warmup_steps + after_warmup)

    @property
    def skipped_updates(self) -> Tensor:
        """How many dual updates a non-finite loss has skipped, a scalar int64 tensor, live."""
        return self._duals.tensors["skipped_updates"]

    @property
    def device(self) -> torch.device:
        """Where the multipliers are."""
        return self._duals.tensors["multipliers"].device

    def to(self, device: torch.device | str) -> DescentConstraints:
        """Move the state to `device`, where the losses must be recorded from now on, and return self."""
        real = torch.float32 if torch.device(device).type == "mps" else self.dtype
        parts = (self._objective, self._coupling, self._bounds)
        for tensors in (*(part.constants for part in parts), *self._states()):
            for name, tensor in tensors.items():
                tensors[name] = tensor.to(device, real if tensor.is_floating_point() else tensor.dtype)
        self._placed = True
        return self

    @torch.no_grad()
    def weights(self) -> Tensor:
        """Return w, (L+1,), a new tensor outside autograd: 𝓛 = Σ_l w_l ℓ_l + constant for the current multipliers.

        w_l may be negative under "chain", and is an exact zero where nothing asks for that depth. The multipliers are
        zero until the warm-up ends, so that w is that of the objective there. It is on `device`: to have the first
        weights on an accelerator, give `device` to the constructor.
        """
        own, *results = self._groups(self._duals.tensors["multipliers"])
        weights = self._objective.weights() + self._coupling.weights(own)
        for multipliers in results:
            weights += multipliers
        return weights

    def known_weights(self) -> tuple[float, ...] | None:
        """The weights of the next step as numbers, where the host knows them: in the warm-up, but for "log"; else None.

        Losses that are given these, in the place of `weights()` on a GPU, skip the backward of a depth of weight zero.
        """
        return self._objective.known_weights() if self._steps < self.warmup_steps else None

    @torch.no_grad()
    def record(self, losses: Tensor, count: float | Tensor) -> None:
        """Add the losses of one micro-batch to what the next dual update sees.

        Args:
            losses: the mean loss over the items of the micro-batch at each depth, (L+1,).
            count: the number of those items (tokens, patches, windows), a number > 0 or a tensor of one element. What a
                dual update sees is the mean over the items of all micro-batches and ranks. A rank that has none for
                this step records a count tensor of zero; what the losses are does not matter then.

        Raises:
            InputError: a shape, the count or a device is wrong.
        """
        losses, count = check_record(losses, count, self.layers)
        if not self._placed:
            self.to(losses.device)
        if losses.device != self.device:
            raise InputError(
                f"losses is on {losses.device}; expected {self.device}, where the multipliers are (move them with "
                ".to(device))"
            )
        self.accumulate(losses, count)
        self._unstepped_records += 1

    @torch.no_grad()
    def accumulate(self, losses: Tensor, count: float | Tensor) -> None:
        """The device's part of `record`, without its checks; the count may be the number 0 here."""
        self._measurement.add(losses, count)

    def step(self) -> None:
        """End an optimizer step: reduce the recorded sums over the ranks and update the multipliers, if that is due.

        An update is one all-reduce of L+2 numbers on the default group where
        torch.distributed is initialized (every rank must call this), after which all ranks hold the same multipliers.
        It is exact: sums and counts are reduced, and g is formed once. During the warm-up nothing is reduced unless
        something is measured there: an automatic reference, the objective "log", or bounds relative to the warm-up.

        Raises:
            InputError: nothing was recorded since the last step.
        """
        if self._unstepped_records == 0:
            raise InputError("nothing was recorded since the last step(); expected record(losses, count) before it")
        self._unstepped_records = 0
        self.apply(self.count_step())

    def count_step(self) -> DualAction:
        """The host's part of `step`: count an optimizer step, and say what it asks of the device.

        With `accumulate` and `apply` for the device's part, `record` and `step` come apart for a captured step,
        whose Python does not run when it is replayed.
        """
        warming_up = self._steps < self.warmup_steps
        self._steps += 1
        self._window_steps += 1
        if not warming_up and self._window_steps < self.dual_every:
            return DualAction.WAIT
        self._window_steps = 0
        if not warming_up:
            return DualAction.UPDATE
        measures = self.reference == "auto" or self._objective.average is not None or self._bounds.average is not None
        return DualAction.MEASURE if measures else DualAction.CLEAR

    @torch.no_grad()
    def apply(self, action: DualAction) -> None:
        """The device's part of `step`."""
        if action is DualAction.WAIT:
            return
        if action is not DualAction.CLEAR:
            self._measurement.reduce()
            losses = self._measurement.means()
            finite = losses.isfinite().all()
            self._coupling.measure_reference(losses[0], finite)
            if self._objective.average is not None:
                self._objective.average.update(losses)
            if action is DualAction.UPDATE:
                self._update_duals(losses, finite)
            elif self._bounds.average is not None:
                self._bounds.average.update(losses)
        self._measurement.clear()

    def epoch_end(self) -> None:
        """Restart the slacks at zero, so that each epoch asks for the constraints anew before it gives way."""
        self._duals.tensors["slacks"].zero_()

    def _update_duals(self, losses: Tensor, finite: Tensor) -> None:
        groups = self._judged(losses, training=True)
        relative = [group.violation / group.scale if self.normalize else group.violation for group in groups]
        self._duals.update(torch.cat(relative), torch.cat([group.active for group in groups]), finite)

    def _judged(self, losses: Tensor, *, training: bool) -> list[Group]:
        """The violations of each group of constraints, in the order of their multipliers."""
        violation, scale = self._coupling.violation(losses, training=training)
        groups = [Group("descent", violation, scale, self._coupling.active)]
        if self._bounds.any:
            groups.append(Group("bound", *self._bounds.violation(losses), self._bounds.active))
        return groups

    @torch.no_grad()
    def report(self, losses: Tensor | Sequence[float], tolerance: float = 0.0) -> FeasibilityReport:
        """Judge per-depth losses, usually held-out ones, against the constraints. This waits for the device.

        Args:
            losses: mean loss at each depth, L+1 numbers or a tensor (L+1,).
            tolerance: the relative violation that still counts as feasible, >= 0.

        Raises:
            InputError: the number of losses, or the tolerance, is wrong.
        """
        tolerance = check_non_negative("tolerance", tolerance)
        losses = torch.as_tensor(losses, dtype=self._measurement.dtype, device=self.device)
        if losses.shape != (self.layers + 1,):
            raise InputError(f"losses has shape {tuple(losses.shape)}; expected ({self.layers + 1},), one a depth")
        groups = self._judged(losses, training=False)
        existing = int(self._coupling.constants["exists"].sum()) + int(self._bounds.constants["bound_exists"].sum())
        judged = sum(int(group.active.sum()) for group in groups)
        return judge(losses, groups, self._coupling.chained, self.rates, tolerance, existing - judged)

    @torch.no_grad()
    def merit(self, losses: Tensor | Sequence[float], *, priced: bool = True) -> float:
        """By what models are compared, lower is better: F(ℓ) + β/2 Σ_l s_l [ĝ_l]₊². This waits for the device.

        It is the objective of the resilient problem, whose minimum the training seeks: at its rest u = [ĝ]₊ = λ/β, so
        that the price is that of the multipliers, without their history. s is 1 where `normalize` is off. Bounds are
        those of `report`. Only values of one moment compare, as the averages and
        the references that they rest on move.

        Args:
            losses: mean loss at each depth, L+1 numbers or a tensor (L+1,), usually held-out ones.
            priced: False: the objective alone.
        """
        losses = torch.as_tensor(losses, dtype=self._measurement.dtype, device=self.device)
        merit = self._objective.value(losses)
        for group in self._judged(losses, training=False) if priced else ():
            squared = group.violation.square() / group.scale if self.normalize else group.violation.square()
            merit += self._duals.slack_cost / 2 * torch.where(group.active & (group.violation > 0), squared, 0.0).sum()
        return float(merit)

    def _groups(self, vector: Tensor) -> tuple[Tensor, ...]:
        """The entries of each group of constraints, (L+1,) each, live."""
        return vector.split(self.layers + 1)

    def _states(self) -> list[dict[str, Tensor]]:
        averages = [part.average for part in (self._objective, self._bounds) if part.average is not None]
        return [part.tensors for part in (self._duals, self._coupling, self._measurement, *averages)]

    def _tensors(self) -> dict[str, Tensor]:
        return {name: tensor for tensors in self._states() for name, tensor in tensors.items()}

    def _settings(self) -> dict[str, int | float | str]:
        return {
            "layers": self.layers,
            **self._coupling.settings,
            **self._objective.settings,
            **self._bounds.settings,
            **self._duals.settings,
            "normalize": self.normalize,
            "warmup_steps": self.warmup_steps,
            "dual_every": self.dual_every,
            "dtype": str(self.dtype),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return settings, counters and copies of the tensors in one flat dictionary.

        Its values are tensors (for safetensors) and plain numbers and strings (for JSON).
        Between steps it is the same on all ranks, unless sums are waiting (after `record`, or inside a window of
        `dual_every` steps): those are this rank's own.
        """
        counters = {name: getattr(self, f"_{name}") for name in _COUNTERS}
        return {**self._settings(), **counters, **{name: tensor.clone() for name, tensor in self._tensors().items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, in place; a run continues bit for bit.

        Raises:
            InputError: a setting differs from this object's, an entry is missing, unknown, of the wrong shape or not
                finite, or a counter is none. Nothing is changed then.
        """
        tensors = self._tensors()
        check_state(state, self._settings(), _COUNTERS, tensors)
        for name, tensor in tensors.items():
            tensor.copy_(state[name])
        for name in _COUNTERS:
            setattr(self, f"_{name}", state[name])
