"""The interface between training and a task, and a run with its measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cdt_fast.constraints.presets import DEFAULTS
from cdt_fast.training.results import Evaluation
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings

Table = list[list[str]]  # rows of words, the first of them the heading


class Task(Protocol):
    """A module for one kind of training, such as `cdt_fast.video.task`."""

    Evaluation: type[Evaluation]  # of its `evaluation.json`
    SAMPLES: str  # what a sample is called, in the plural
    BF16_ON_CPU: bool  # products in bfloat16 are faster on a CPU that has them, and the result is the same within seeds
    FIXED_SHAPES: bool  # all full batches of a run have the same shapes, so that a step can be captured

    # Check the settings, then read what they name, divided into `train`, `validation` and `test`.
    def load(self, settings: Any, progress: bool = True) -> Any: ...

    # Return the training of these settings on these data, with an untrained or a pretrained model.
    def build(self, settings: Any, data: Any, device: torch.device) -> Workload: ...

    # Measure the model that a run kept on its test data: `Evaluation` but for what `training` adds.
    def evaluate(self, folder: RunFolder, settings: Any, data: Any) -> dict[str, Any]: ...

    # Return the task's own parts of a report on runs.
    def report(self, runs: Sequence[EvaluatedRun]) -> Report: ...


class Workload(Protocol):
    """Model, losses and batches of one training. A sample (a window, a text, a sequence) is chosen by its number among
    the training samples, and has its own seed."""

    model: nn.Module  # on the CPU until the loop places it
    num_constraints: int  # L; there are L+1 losses
    training_samples: int
    lr: float
    steps: int  # optimizer steps of the whole training
    description: str  # of the data, in a few lines, with what the user should know of them
    guess_loss: float | None  # of a guess among the classes or tokens; None: the task has no such answers

    # Return a module whose forward `(*batch, weights)` gives `(total, per_depth)`, means over what counts.
    # `autocast` is the dtype of the matrix products; None: that of the weights.
    def losses(self, autocast: torch.dtype | None) -> nn.Module: ...

    # Return over how many items (tokens, texts) the losses of a training sample are means.
    def count(self, sample: int) -> int: ...

    # Return what `losses` takes of training samples, `(number, seed)` each, on `device`, right before use.
    def batch(self, chosen: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, ...]: ...

    # Return the mean loss of every depth `[L+1]` on the validation samples, at the training noise.
    def validation_losses(self, autocast: torch.dtype | None) -> list[float]: ...

    # Return the headline of the evaluation on the validation samples, by which models are kept where it is of
    # more than the training noise; else None, and they are kept by their losses.
    def validation_error(self, autocast: torch.dtype | None) -> float | None: ...

    # Write the model to `folder`, in place of an earlier one.
    def save_model(self, folder: Path) -> None: ...

    # Say which kernels a step runs on `device` with products in `dtype`, and why not others.
    def kernels(self, device: torch.device, dtype: torch.dtype) -> str: ...


@dataclass
class Report:
    """The task's own parts of a report on runs; what is about one run is about the first."""

    conditions: str  # on what and how it was measured
    must_agree: dict[str, Any]  # what runs must agree in to be compared, by the name that a message calls it
    # What its verdict reads: the lower, the better.
    measure: str  # with the noise level, as "RMSE at γ 0.15"
    depths: list[float]  # 0 to L
    references: dict[str, float]  # of what costs no training, by name: the input, baselines without weights, a guess
    margins: list[float] | None = None  # of the depths, half of their 95 % intervals; None: not known
    tables: list[Table] = field(default_factory=list)
    # Caption, and what draws it: a figure, or None where there is nothing to draw. The first comes first in a report.
    pictures: list[tuple[str, Callable[[Sequence[EvaluatedRun]], Any]]] = field(default_factory=list)


@dataclass(frozen=True)
class EvaluatedRun:
    """A run with its measurements, and what to call it where its folder's name is not enough."""

    folder: RunFolder
    settings: RunSettings
    task: Task
    evaluation: Any  # the `Evaluation` of the task
    name: str | None = None

    @property
    def label(self) -> str:
        """Return the run's name and how it was trained."""
        constrained = self.evaluation.constrained
        words = ["constrained" if constrained else "unconstrained"]
        if self.settings.objective != (DEFAULTS.objective if constrained else "last"):
            words.append(f"objective {self.settings.objective}")
        if constrained and self.settings.constraints.coupling != DEFAULTS.coupling:
            words.append(self.settings.constraints.coupling)
        return f"{self.name or self.folder.name} ({', '.join([*words, self.evaluation.kind])})"
