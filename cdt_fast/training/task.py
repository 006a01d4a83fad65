"""What the training loop asks of a task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Task(Protocol):
    """Data, model and losses of one kind of training.

    A sample (a window, a text, a sequence) is chosen by its number among the training samples, and comes with a seed of
    its own for what is drawn for it.

    Attributes:
        model: the network, on the CPU until the loop places it.
        layers: L; there are L+1 losses.
        samples: what a sample is called, in the plural.
        subject: what the samples are taken from, in the plural.
        training_samples: how many there are to train on.
        lr: the learning rate.
        steps: optimizer steps of the whole training.
        steps_per_epoch: optimizer steps that see every sample once.
        note: what a person should know before the training starts, or None.
    """

    model: nn.Module
    layers: int
    samples: str
    subject: str
    training_samples: int
    lr: float
    steps: int
    steps_per_epoch: int
    note: str | None

    def losses(self) -> nn.Module:
        """A module whose forward `(inputs, targets, weights)` gives `(total, per_layer)`, means over what counts."""
        ...

    def count(self, sample: int) -> int:
        """Over how many items (tokens, texts) the losses of a training sample are means."""
        ...

    def batch(self, chosen: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets of training samples, `(number, seed)` each, on `device`; asked for right before use."""
        ...

    def validation_losses(self) -> list[float]:
        """Mean loss of every depth `[L+1]` on the validation samples, at the training noise."""
        ...

    def data_identity(self) -> dict[str, Any]:
        """By what a resumed run knows its data again."""
        ...

    def save_model(self, folder: Path) -> None:
        """Write the model to `folder`, in place of an earlier one."""
        ...


def mean_depth_losses(task: Task) -> list[float]:
    """`task.validation_losses()` with the model in evaluation mode."""
    was_training = task.model.training
    task.model.eval()
    try:
        return task.validation_losses()
    finally:
        task.model.train(was_training)


def notes_before(task: Task, constrained: bool, warmup_steps: int, step: int) -> list[str]:
    """What a person should know before the training starts or, after `step` steps, goes on: the task's own note, where
    it goes on, and that its constraints never come on.
    """
    notes = [] if task.note is None else [task.note]
    if step:
        notes.append(f"continues after step {step:,} of {task.steps:,}")
    if constrained and warmup_steps >= task.steps:
        notes.append(
            f"note: the constraints come on after a warm-up of {warmup_steps:,} steps, and the training ends at step "
            f"{task.steps:,}: it is one without constraints. Train longer, or with --warmup-epochs 0"
        )
    return notes
