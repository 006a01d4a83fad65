"""The plug of a task: all that the training loop, the evaluation and the report ask of one kind of training."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError
from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.constraints.presets import DEFAULTS
from cdt_fast.training.results import Evaluation
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings

Table = list[list[str]]  # rows of words, the first of them the heading


class Drawing(NamedTuple):
    """A picture of a report: the name of its file, its caption, and what draws it from evaluated runs."""

    name: str
    caption: str
    draw: Callable[[Sequence[EvaluatedRun]], Any]


class Summary(NamedTuple):
    """A column of the table over seeds: its heading, and a run's number in it (None: not known)."""

    heading: str
    value: Callable[[EvaluatedRun], float | None]


class Reading(NamedTuple):
    """What a verdict reads of a run: the lower, the better."""

    measure: str  # with the noise level, as "RMSE at γ 0.15"
    depths: list[float]  # 0 to L
    references: dict[str, float]  # of what costs no training, by name: the input, baselines without weights, a guess
    margins: list[float] | None = None  # of the depths, half of their 95 % intervals; None: not known
    samples: str = ""  # on how many of what, as "40 texts"


class Workload(Protocol):
    """Model, losses and batches of one training.

    A sample (a window, a text, a sequence) is chosen by its number among the training samples, and comes with a seed of
    its own for what is drawn for it.
    """

    model: nn.Module  # on the CPU until the loop places it
    num_constraints: int  # L; there are L+1 losses
    training_samples: int
    lr: float
    steps: int  # optimizer steps of the whole training
    note: str | None  # what the user should know before the training starts
    guess_loss: float | None  # of a guess among the classes or tokens; None: the task has no such answers

    def losses(self, autocast: torch.dtype | None) -> nn.Module:
        """A module whose forward `(*batch, weights)` gives `(total, per_depth)`, means over what counts.

        `autocast` is the dtype of the matrix products; None: that of the weights.
        """
        ...

    def count(self, sample: int) -> int:
        """Over how many items (tokens, texts) the losses of a training sample are means."""
        ...

    def batch(self, chosen: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, ...]:
        """What `losses` takes of training samples, `(number, seed)` each, on `device`; asked for right before use."""
        ...

    def validation_losses(self, autocast: torch.dtype | None) -> list[float]:
        """Mean loss of every depth `[L+1]` on the validation samples, at the training noise."""
        ...

    def data_identity(self) -> dict[str, Any]:
        """By what a resumed run knows its data again."""
        ...

    def save_model(self, folder: Path) -> None:
        """Write the model to `folder`, in place of an earlier one."""
        ...

    def kernels(self, device: torch.device, dtype: torch.dtype) -> str:
        """Which kernels a step runs on `device` with products in `dtype`, and why not others, in words."""
        ...


class Task(ABC):
    """One kind of training. A subclass is all that `training` needs of it; it knows no other task.

    What it is given that cannot be used is an InputError, and a package that is not installed a MissingExtra.
    """

    name: ClassVar[str]  # as in the command line
    samples: ClassVar[str]  # what a sample is called, in the plural
    subject: ClassVar[str]  # what the samples are taken from, in the plural
    sample: ClassVar[str]  # what `per_sample` of an evaluation is of, in the singular
    evaluation: ClassVar[type[Evaluation]]  # of its `evaluation.json`
    fixed_shapes: ClassVar[bool]  # all full batches of a run have the same shapes, so that a step can be captured

    @abstractmethod
    def check(self, settings: Any) -> None:
        """Find settings that do not fit each other before any data are read."""

    @abstractmethod
    def load(self, settings: Any, progress: bool = True) -> Any:
        """What the settings name, divided into `train`, `validation` and `test`."""

    @abstractmethod
    def describe(self, settings: Any, data: Any) -> str:
        """What `load` found, in a line or two."""

    @abstractmethod
    def build(self, settings: Any, data: Any, device: torch.device) -> Workload:
        """The training of these settings on these data, with an untrained or a pretrained model."""

    @abstractmethod
    def evaluate(
        self, folder: RunFolder, settings: Any, data: Any, constraints: DescentConstraints, progress: bool = True
    ) -> dict[str, Any]:
        """What the model that a run kept measures on its test data: `evaluation` but for what `training` adds."""

    @abstractmethod
    def kind(self, run: EvaluatedRun) -> str:
        """How a run was trained, in a word or two, beside whether it was constrained."""

    @abstractmethod
    def comparable(self, run: EvaluatedRun) -> dict[str, Any]:
        """What two runs must agree in to be compared, by the name that a message calls it."""

    @abstractmethod
    def conditions(self, run: EvaluatedRun) -> str:
        """On what and how a run was measured, for the head of a report."""

    @abstractmethod
    def reading(self, run: EvaluatedRun) -> Reading:
        """What the verdict on a run is about."""

    @abstractmethod
    def tables(self, runs: Sequence[EvaluatedRun]) -> list[Table]:
        """The tables of a report that are the task's own."""

    @abstractmethod
    def summaries(self, runs: Sequence[EvaluatedRun]) -> list[Summary]:
        """The task's own columns of the table over seeds."""

    @abstractmethod
    def drawings(self) -> list[Drawing]:
        """The pictures of a report that are the task's own."""

    def beside_others(
        self, folder: RunFolder, settings: Any, sources: Sequence[str]
    ) -> tuple[Table, list[dict[str, Any]]]:
        """Measure the trained model on other data beside others that do the same.

        Returns a table, and its values for JSON.
        """
        raise InputError(f"{folder.path}: is a run of `train {self.name}`; --clips is for denoisers of video")

    def denoise(
        self, folder: RunFolder, settings: Any, source: str, target: str | os.PathLike[str], **options: Any
    ) -> dict[str, Any]:
        """Run the trained model over `source` and write `target`; see `cdt_fast.video.denoising.denoise_video`."""
        raise InputError(f"{folder.path}: is a run of `train {self.name}`; only runs on video denoise")


@dataclass(frozen=True)
class EvaluatedRun:
    """A run with its measurements, and what to call it where its folder's name is not enough."""

    folder: RunFolder
    settings: RunSettings
    task: Task
    evaluation: Any  # an Evaluation: that of the task
    name: str | None = None

    @property
    def kind(self) -> str:
        """How the run was trained, in words."""
        words = ["constrained" if self.evaluation.constrained else "unconstrained"]
        if self.settings.objective != (DEFAULTS.objective if self.evaluation.constrained else "last"):
            words.append(f"objective {self.settings.objective}")
        if self.evaluation.constrained and self.settings.constraints.coupling != DEFAULTS.coupling:
            words.append(self.settings.constraints.coupling)
        return ", ".join([*words, self.task.kind(self)])

    @property
    def label(self) -> str:
        """The run's name and how it was trained."""
        return f"{self.name or self.folder.name} ({self.kind})"
