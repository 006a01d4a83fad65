"""Descent constraints: every layer must lower the loss, and multipliers turn that into weights of per-depth losses.

    min ℓ_L   s.t.   g_l = ℓ_l − r_l ℓ_{l−1} ≤ 0  (l = 1..L),   g_0 = ℓ_0 − ε₀ ≤ 0,          r_l = 1 − α_l
    Lagrangian   ℓ_L + Σ_l λ_l g_l = Σ_l w_l ℓ_l + constant

One step of training:

    weights = constraints.weights()                        # known before the forward
    total, per_layer = model.layer_losses(noisy, clean, depth_weights=weights)
    total.backward()
    constraints.record(per_layer, count)                   # once a micro-batch
    optimizer.step()
    constraints.step()                                     # the multipliers move for the next step
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from cdt_fast.checks import check_choice, check_fraction, check_integer, check_non_negative, check_number
from cdt_fast.constraints.duals import DualAction, DualVariables
from cdt_fast.constraints.feasibility import FeasibilityReport
from cdt_fast.constraints.presets import (
    DEFAULTS,
    REFERENCE_MEASUREMENTS,
    Coupling,
    Dual,
    Preset,
    ReferenceMode,
    Resilience,
    options_of,
)
from cdt_fast.errors import InputError

# What a saved state holds besides settings and tensors.
_COUNTERS = ("steps", "window_steps", "unstepped_records")


class DescentConstraints:
    """The multipliers of the descent constraints, and the rule that moves them.

    Let r_l = 1 − α_l, and ε₀ the reference. The constraints g_l ≤ 0 and the weights w of the Lagrangian are

        coupling     g_l (l = 1..L)           w_l (l < L)            w_L
        "chain"      ℓ_l − r_l ℓ_{l−1}        λ_l − r_{l+1} λ_{l+1}  1 + λ_L
        "detach"     the same                 λ_l                    1 + λ_L     ℓ_{l−1} is a constant in the gradient
        "absolute"   ℓ_l − ε₀ ∏_{j≤l} r_j     λ_l                    1 + λ_L

    with g_0 = ℓ_0 − ε₀ when there is a reference. With reference_mode="anchor" there is no g_0, g_1 = ℓ_1 − r_1 ε₀
    under "chain" and "detach", and w_0 = 0. Without a reference λ_0 stays 0. λ and the slacks u start at 0.

    One dual update, from the losses recorded since the last one. All of it reads the state from before the step
    (as the primal step does: it used the λ from before), then all of it is written:

        ĝ = g,  or g_l / |ℓ_{l−1}| with normalize=True
        e = ĝ − u  under "slack", else ĝ;        κ = 1/β  under "decay", else 0;        β = slack_cost
        λ ← [rule(λ, e, κλ)]₊                    rule: "ascent", λ + dual_lr (e − κλ), or "adam" or "pi"
        u ← [u − slack_lr (β u − λ)]₊            under "slack"

    Both forms of resilience rest where ĝ = λ/β; the slack form gets there with u = λ/β. The decay is part of the
    gradient that Adam normalizes: decoupled decay (AdamW) rests elsewhere.

    normalize=True divides each violation by its scale s_l = |ℓ_{l−1}| (|ε₀| where the bound is the reference or
    comes from an anchor, |ε₀ ∏ r| under "absolute"), in the dual step only: raw violations shrink geometrically with
    depth. The Lagrangian and its weights stay those of the raw constraints, so without resilience the solution is the
    same. With resilience the slack is then relative, a fraction of s_l: the rest point is g_l = s_l λ_l / β, that of
    the raw problem with the cost β / s_l at layer l.

    A non-finite loss (or a scale of zero under normalize) skips the whole dual update, on the device, and adds one to
    `skipped_updates`; multipliers, slacks and the state of the rule stay as they were.

    The tensors it exposes are live: they change in place and keep their storage from step to step (only `to`, or
    the move to the device of the first recorded losses, replaces them). Clone what you want to keep.
    `weights`, `record` and `step` never wait for the device.

    Args:
        layers: L, at least 1. There are L+1 losses: depth 0 is the input of layer 1.
        rate: α, one number for all layers or L of them, in [0, 1).
        reference: ε₀, a positive number in units of the loss, "auto" or None. "auto" takes the mean of ℓ_0 over the
            first 20 measurements (`REFERENCE_MEASUREMENTS`): every step during the warm-up, every dual update after
            it, those with a non-finite loss left out. The constraints that need ε₀ become active with the 20th.
        dual: "ascent", "adam" or "pi".
        dual_lr: step size of the multipliers; for "pi" the integral gain κ_i. Adam moves a multiplier by about this
            much a step whatever the scale of the losses; the others by this times the violation.
        betas: Adam's decay of the first and second moment. The first is 0 because dual momentum overshoots.
        proportional_gain: κ_p of "pi".
        smoothing: ν of "pi", in [0, 1): the decay of the average that the proportional part follows.
        resilience: "slack", "decay" or None. Without it an infeasible problem sends λ to infinity.
        slack_cost: β, what a unit of squared slack costs, β/2 ‖u‖²: the larger, the harder the constraints.
        slack_lr: step size of the slacks; None: 0.1 / slack_cost.
        coupling: "chain", "detach" or "absolute"; "absolute" needs a reference.
        reference_mode: "constraint" (g_0) or "anchor"; "anchor" needs a reference.
        normalize: whether the dual step sees relative violations; for losses that are positive.
        margin: share, in [0, 1), by which every bound is lowered while training: g_l = ℓ_l − (1 − margin) r_l ℓ_{l−1},
            and likewise for the other bounds. `report` judges by the bounds themselves. A solution sits on its bounds,
            and on held-out data a little above or below them; the margin is what keeps it below.
        warmup_steps: number of steps with the constraints off: weights (0, …, 0, 1) and no dual update.
        dual_every: number of steps per dual update. Their sums and counts add up; λ is constant meanwhile.
        device: where the state lives; None: where the first recorded losses are (the CPU until then).
        dtype: torch.float64 or torch.float32; float32 on a device without float64 (mps).

    Raises:
        InputError: an argument is outside what is said above.
    """

    def __init__(
        self,
        layers: int,
        rate: float | Sequence[float] = DEFAULTS.rate,
        reference: float | Literal["auto"] | None = DEFAULTS.reference,
        *,
        dual: Dual = DEFAULTS.dual,
        dual_lr: float = DEFAULTS.dual_lr,
        betas: tuple[float, float] = DEFAULTS.betas,
        proportional_gain: float = DEFAULTS.proportional_gain,
        smoothing: float = DEFAULTS.smoothing,
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
        self.layers = check_integer("layers", layers, 1)
        self.reference = _reference(reference)
        self.coupling = check_choice("coupling", coupling, get_args(Coupling))
        self.reference_mode = check_choice("reference_mode", reference_mode, get_args(ReferenceMode))
        self.normalize = bool(normalize)
        self.margin = check_fraction("margin", margin)
        self.warmup_steps = check_integer("warmup_steps", warmup_steps, 0)
        self.dual_every = check_integer("dual_every", dual_every, 1)
        self.dtype = check_choice("dtype", dtype, (torch.float32, torch.float64))
        if self.reference is None and (coupling == "absolute" or reference_mode == "anchor"):
            needs = 'coupling="absolute"' if coupling == "absolute" else 'reference_mode="anchor"'
            raise InputError(f'reference is None; {needs} needs one: a number > 0 or "auto"')
        self._duals = DualVariables(
            self.layers + 1,
            dtype,
            dual=dual,
            dual_lr=dual_lr,
            betas=betas,
            proportional_gain=proportional_gain,
            smoothing=smoothing,
            resilience=resilience,
            slack_cost=slack_cost,
            slack_lr=slack_lr,
        )
        self._steps = 0
        self._window_steps = 0
        self._unstepped_records = 0
        self._rates = _rates(rate, self.layers)
        self._constants = self._make_constants()
        self._state = self._make_state()
        self._placed = False
        if device is not None:
            self.to(device)

    def _make_constants(self) -> dict[str, Tensor]:
        rate = torch.tensor(self._rates, dtype=self.dtype)
        anchored = self.reference_mode == "anchor"
        exists = torch.ones(self.layers + 1, dtype=torch.bool)
        exists[0] = self.reference is not None and not anchored
        uses_reference = torch.full((self.layers + 1,), self.coupling == "absolute")
        uses_reference[0] = True
        uses_reference[1] |= anchored
        # The share of λ_l that depth l−1 carries: none where the bound of layer l is a constant in the gradient.
        upstream = (1 - self.margin) * (1 - rate) if self.coupling == "chain" else torch.zeros_like(rate)
        upstream = torch.where(uses_reference[1:], 0.0, upstream)
        constants = {
            "rates": rate,
            "factors": torch.cat([rate.new_ones(1), 1 - rate]),
            "exists": exists,
            "uses_reference": uses_reference,
            "upstream": upstream,
        }
        if self.reference != "auto":
            level = math.nan if self.reference is None else float(self.reference)
            constants["reference_level"] = torch.tensor(level, dtype=self.dtype)
        return constants

    def _make_state(self) -> dict[str, Tensor]:
        state = {"accumulated": torch.zeros(self.layers + 2, dtype=self.dtype)}  # loss sums, then the count
        if self.reference == "auto":
            state["reference_level"] = torch.zeros((), dtype=self.dtype)
            state["reference_measurements"] = torch.zeros((), dtype=torch.int64)
        return state

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
            name: "video", "text" and "lm" are what `cdt-fast train` starts from in these tasks. "paper-video",
                "paper-text" and "paper-llm" are reconstructions of the paper's settings (rate and ε₀ as tabled, Adam
                with its usual betas, slack, chain, raw violations, no margin). "safe" is meant for a new problem: no
                depth is ever pushed up, relative violations, no dual momentum, ε₀ from the first steps, decay.
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
        """λ, (L+1,), live. Entry 0 belongs to the reference constraint."""
        return self._duals.tensors["multipliers"]

    @property
    def slacks(self) -> Tensor:
        """u, (L+1,), live, in the units of ĝ; zero unless resilience is "slack"."""
        return self._duals.tensors["slacks"]

    @property
    def rates(self) -> Tensor:
        """α, (L,)."""
        return self._constants["rates"]

    @property
    def reference_level(self) -> Tensor:
        """ε₀, a scalar tensor: NaN without a reference, the running mean so far while "auto" is not fixed."""
        return self._state["reference_level"] if self.reference == "auto" else self._constants["reference_level"]

    @property
    def skipped_updates(self) -> Tensor:
        """How many dual updates a non-finite loss has skipped, a scalar int64 tensor, live."""
        return self._duals.tensors["skipped_updates"]

    @property
    def device(self) -> torch.device:
        """Where the multipliers are."""
        return self.multipliers.device

    def to(self, device: torch.device | str) -> DescentConstraints:
        """Move the state to `device`, where the losses must be recorded from now on, and return self."""
        real = torch.float32 if torch.device(device).type == "mps" else self.dtype
        for tensors in (self._constants, self._state, self._duals.tensors):
            for name, tensor in tensors.items():
                tensors[name] = tensor.to(device, real if tensor.is_floating_point() else tensor.dtype)
        self._placed = True
        return self

    @torch.no_grad()
    def weights(self) -> Tensor:
        """Return w, (L+1,), a new tensor outside autograd: 𝓛 = Σ_l w_l ℓ_l + constant for the current multipliers.

        w_l may be negative under "chain", and is an exact zero where nothing asks for that depth. The multipliers are
        zero until the warm-up ends, so that w is (0, …, 0, 1) there. It is on `device`: to have the first weights on
        an accelerator, give `device` to the constructor.
        """
        weights = self.multipliers.clone()
        weights[:-1].sub_(self._constants["upstream"] * self.multipliers[1:])
        weights[-1].add_(1)
        return weights

    def known_weights(self) -> tuple[float, ...] | None:
        """The weights of the next step where the host knows them: (0, …, 0, 1) while the warm-up lasts; else None.

        A loss that is given these and not the tensor of `weights` can leave out the backward of what counts nothing.
        """
        return (*[0.0] * self.layers, 1.0) if self._steps < self.warmup_steps else None

    @torch.no_grad()
    def record(self, losses: Tensor, count: float | Tensor) -> None:
        """Add the losses of one micro-batch to what the next dual update sees.

        Args:
            losses: the mean loss over the items of the micro-batch at each depth, (L+1,).
            count: the number of those items (tokens, patches, windows), a number > 0 or a tensor of one element. What
                a dual update sees is the mean over the items of all micro-batches and ranks. A rank that has none for
                this step records a count tensor of zero; what the losses are does not matter then.

        Raises:
            InputError: the shape, the count or the device is wrong.
        """
        if not isinstance(losses, Tensor) or losses.shape != (self.layers + 1,):
            given = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise InputError(f"losses is {given}; expected a tensor of shape ({self.layers + 1},), a mean per depth")
        if isinstance(count, Tensor):
            if count.numel() != 1:
                raise InputError(f"count has shape {tuple(count.shape)}; expected one element, the number of items")
            count = count.reshape(())
        else:
            count = check_number("count", count, "a number > 0", lambda number: number > 0)
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
        accumulated = self._state["accumulated"]
        sums = losses.to(accumulated.dtype) * count
        if isinstance(count, Tensor):
            sums = torch.where(count > 0, sums, 0.0)  # the mean of nothing may be NaN
        elif not count:
            return
        accumulated[:-1].add_(sums)
        accumulated[-1].add_(count)

    def step(self) -> None:
        """End an optimizer step: reduce the recorded sums over the ranks and update the multipliers, if that is due.

        An update is one all-reduce of L+2 numbers on the default group where torch.distributed is initialized (every
        rank must call this), after which all ranks hold the same multipliers. It is exact: sums and counts are
        reduced, and g is formed once. During the warm-up nothing is reduced unless reference is "auto".

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
        return DualAction.MEASURE if self.reference == "auto" else DualAction.CLEAR

    @torch.no_grad()
    def apply(self, work: DualAction) -> None:
        """The device's part of `step`."""
        if work is DualAction.WAIT:
            return
        if work is not DualAction.CLEAR:
            losses = self._mean_losses()
            if self.reference == "auto":
                self._measure_reference(losses[0], losses.isfinite().all())
            if work is DualAction.UPDATE:
                self._update_duals(losses)
        self._state["accumulated"].zero_()

    def epoch_end(self) -> None:
        """Restart the slacks at zero, so that each epoch asks for the constraints anew before it gives way."""
        self.slacks.zero_()

    def _mean_losses(self) -> Tensor:
        accumulated = self._state["accumulated"]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(accumulated)
        return accumulated[:-1] / accumulated[-1]

    def _measure_reference(self, loss: Tensor, finite: Tensor) -> None:
        level, measurements = self._state["reference_level"], self._state["reference_measurements"]
        taken = finite & (measurements < REFERENCE_MEASUREMENTS)
        level.copy_(torch.where(taken, level + (loss - level) / (measurements + 1), level))
        measurements += taken

    def _update_duals(self, losses: Tensor) -> None:
        violation, scale = self._violation(losses, self.margin)
        if self.normalize:
            violation = violation / scale
        self._duals.update(violation, self._active(), losses.isfinite().all())

    def _active(self) -> Tensor:
        """Which constraints are in force, (L+1,) bool: those that exist and whose reference, if any, is fixed."""
        if self.reference != "auto":
            return self._constants["exists"]
        fixed = self._state["reference_measurements"] >= REFERENCE_MEASUREMENTS
        return self._constants["exists"] & (fixed | ~self._constants["uses_reference"])

    def _violation(self, losses: Tensor, margin: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return g, with bounds lowered by `margin`, and the scale that makes it relative, both (L+1,).

        Without meaning where not active.
        """
        factors, reference = self._constants["factors"], self.reference_level
        if self.coupling == "absolute":
            bound = reference * factors.cumprod(0)
            return losses - (1 - margin) * bound, bound.abs()
        before = torch.where(self._constants["uses_reference"], reference, losses.roll(1))
        return losses - (1 - margin) * factors * before, before.abs()

    @torch.no_grad()
    def report(self, losses: Tensor | Sequence[float], tolerance: float = 0.0) -> FeasibilityReport:
        """Judge per-depth losses, usually held-out ones, against the constraints. This waits for the device.

        Args:
            losses: mean loss at each depth, L+1 numbers or a tensor of shape (L+1,).
            tolerance: the relative violation that still counts as feasible, >= 0.

        Raises:
            InputError: the number of losses or the tolerance is wrong.
        """
        tolerance = check_non_negative("tolerance", tolerance)
        losses = torch.as_tensor(losses, dtype=self.multipliers.dtype, device=self.device)
        if losses.shape != (self.layers + 1,):
            raise InputError(f"losses has shape {tuple(losses.shape)}; expected ({self.layers + 1},), one a depth")
        violation, scale = self._violation(losses)
        # A bound of zero that is met exactly is 0/0.
        relative = torch.where(violation == 0, 0.0, violation / scale)
        active: list[bool] = self._active().tolist()
        judged = [number if holds else None for number, holds in zip(relative.tolist(), active, strict=True)]
        numbers = {depth: number for depth, number in enumerate(judged) if number is not None}
        worst = max(numbers, key=lambda depth: (math.isnan(numbers[depth]), numbers[depth]), default=None)
        finite = bool(losses.isfinite().all())
        return FeasibilityReport(
            feasible=finite and bool(numbers) and all(number <= tolerance for number in numbers.values()),
            finite=finite,
            violation=[number if holds else None for number, holds in zip(violation.tolist(), active, strict=True)],
            relative_violation=judged,
            ratio=(losses[1:] / losses[:-1]).tolist(),
            worst_layer=worst,
            worst_violation=None if worst is None else numbers[worst],
            tolerance=tolerance,
        )

    def _settings(self) -> dict[str, int | float | str]:
        return {
            "layers": self.layers,
            "rate": ", ".join(map(repr, self._rates)),
            "reference": "none" if self.reference is None else self.reference,
            **self._duals.settings,
            "coupling": self.coupling,
            "reference_mode": self.reference_mode,
            "normalize": self.normalize,
            "margin": self.margin,
            "warmup_steps": self.warmup_steps,
            "dual_every": self.dual_every,
            "dtype": str(self.dtype),
        }

    def _tensors(self) -> dict[str, Tensor]:
        return {**self._duals.tensors, **self._state}

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
        settings, tensors = self._settings(), self._tensors()
        # Settings first: another rule has other tensors too, and its name is what the reader needs to see.
        for name, here in settings.items():
            if name in state and state[name] != here:
                raise InputError(f"the saved state has {name} = {state[name]}; expected {here}, as constructed here")
        expected = {*settings, *_COUNTERS, *tensors}
        if expected != set(state):
            raise InputError(
                f"the saved state lacks {sorted(expected - set(state))} and has the unknown "
                f"{sorted(set(state) - expected)}; expected what state_dict() returned"
            )
        for name, tensor in tensors.items():
            saved = state[name]
            if not isinstance(saved, Tensor) or saved.shape != tensor.shape:
                raise InputError(f"the saved {name} is {saved!r}; expected a tensor of shape {list(tensor.shape)}")
            # Sums of losses may be infinite: an update looks at them before it uses them.
            if name != "accumulated" and not bool(saved.isfinite().all()):
                raise InputError(f"the saved {name} is {saved.tolist()}; expected finite numbers")
        for name in _COUNTERS:
            check_integer(f"the saved {name}", state[name], 0)
        for name, tensor in tensors.items():
            tensor.copy_(state[name])
        for name in _COUNTERS:
            setattr(self, f"_{name}", state[name])


def _reference(value: Any) -> float | str | None:
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    return check_number("reference", value, 'a finite number > 0, "auto" or None', lambda number: number > 0)


def _rates(rate: Any, layers: int) -> list[float]:
    if not isinstance(rate, Sequence) or isinstance(rate, str):
        expected = f"a number in [0, 1), or a sequence of {layers} of them, one a layer"
        return [check_number("rate", rate, expected, lambda number: 0 <= number < 1)] * layers
    if len(rate) != layers:
        raise InputError(f"rate has {len(rate)} entries; expected a number, or a sequence of {layers}, one a layer")
    return [check_fraction(f"rate[{index}]", entry) for index, entry in enumerate(rate)]
