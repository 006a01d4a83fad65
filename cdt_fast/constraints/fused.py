"""The dual update and the weights of the depths as one kernel each: they are most of the launches of a step otherwise.

The kernels take what the tasks start from: Adam, ratios of mean losses to the loss before or to an anchor, constraints
of descent alone, rates that do not tighten, and a state in float64. All else, and the CPU, is for plain torch, which
they are held to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cdt_fast.constraints.coupling import DescentCoupling
from cdt_fast.constraints.duals import DualVariables
from cdt_fast.constraints.measurement import AVERAGED, Measurement
from cdt_fast.constraints.objective import Objective
from cdt_fast.constraints.presets import REFERENCE_MEASUREMENTS
from cdt_fast.constraints.rules import ADAM_EPSILON, Adam
from cdt_fast.kernels.arguments import DepthWeightsArguments, DualUpdateArguments
from cdt_fast.kernels.launch import KernelError
from cdt_fast.ops.shared.backend import give_up, runs_kernel

NAME = "dual_update"


@dataclass(frozen=True)
class FusedDuals:
    """The parts of some constraints that the kernels take, those for which `fits` holds."""

    duals: DualVariables
    coupling: DescentCoupling
    objective: Objective
    measurement: Measurement
    normalize: bool
    constants: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rule = self.duals.rule
        assert isinstance(rule, Adam)
        decays = (part for beta in (rule.first_beta, rule.second_beta) for part in (beta, 1 - beta))
        settings = (rule.dual_lr, *decays, self.duals.slack_cost, self.duals.slack_lr)
        self.constants["settings"] = torch.tensor(settings, dtype=torch.float64)

    @staticmethod
    def fits(duals: DualVariables, coupling: DescentCoupling, measurement: Measurement) -> bool:
        """Whether these are what the kernels take, where there are constraints of descent alone."""
        of_means = measurement.ratio == "mean" and measurement.dtype == torch.float64
        return isinstance(duals.rule, Adam) and coupling.is_steady and of_means

    def update(self, moves: bool) -> bool:
        """Take in the sums over all ranks, with `moves` move the multipliers, and clear the sums.

        Returns:
            Whether it is done; else nothing has changed, and it is for plain torch.
        """
        if not runs_kernel(NAME, self.measurement.tensors["accumulated"].device):
            return False
        from cdt_fast.kernels.dual_update import dual_update

        constants, average = self.coupling.constants, self.objective.average
        arguments = DualUpdateArguments(
            **self.duals.tensors,
            average=None if average is None else average.losses,
            average_updates=None if average is None else average.updates,
            accumulated=self.measurement.tensors["accumulated"],
            factors=constants["factors"],
            exists=constants["exists"],
            uses_reference=constants["uses_reference"],
            reference=self.coupling.reference_level,
            reference_measurements=self.coupling.tensors.get("reference_measurements"),
            settings=self.constants["settings"],
            measurements=REFERENCE_MEASUREMENTS,
            averaged=AVERAGED,
            epsilon=ADAM_EPSILON,
            resilience=self.duals.resilience,
            relative=self.normalize,
            moves=moves,
        )
        try:
            dual_update(arguments)
        except KernelError as error:
            if not give_up(NAME, error):
                raise
            return False
        return True

    def weights(self) -> Tensor | None:
        """As `DescentConstraints.weights`; None where they are for plain torch."""
        multipliers = self.duals.tensors["multipliers"]
        if not runs_kernel(NAME, multipliers.device):
            return None
        from cdt_fast.kernels.dual_update import depth_weights

        average = self.objective.average
        arguments = DepthWeightsArguments(
            average=None if average is None else average.losses,
            multipliers=multipliers,
            coefficients=self.objective.constants["coefficients"],
            upstream=self.coupling.constants["upstream"],
        )
        try:
            return depth_weights(arguments)
        except KernelError as error:
            if not give_up(NAME, error):
                raise
            return None
