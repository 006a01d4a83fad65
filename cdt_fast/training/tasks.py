"""What the tasks differ in (data, models, losses, evaluation); the loop that they share is `cdt_fast.training.loop`."""

from __future__ import annotations

from typing import Any

import torch

from cdt_fast.training.config import RunConfig
from cdt_fast.training.task import Task, mean_depth_losses, notes_before

__all__ = ["Task", "build_task", "mean_depth_losses", "notes_before"]


def build_task(config: RunConfig, data: Any, device: torch.device) -> Task:
    """The task of the settings on data from `building.load_data`, with an untrained or a pretrained model.

    Args:
        config: the settings.
        data: what the model trains on.
        device: where the model will be.

    Raises:
        InputError: the settings and the data do not fit each other, or a pretrained model cannot be used.
        MissingExtra: a package that the model needs is not installed.
    """
    # Each task is imported where it is asked for: the readers and models of the others stay out of memory.
    if config.task == "text":
        from cdt_fast.sequence.text import text_task

        return text_task(config, data)
    if config.task == "lm":
        from cdt_fast.sequence.language import language_task

        return language_task(config, data)
    from cdt_fast.video.task import VideoTask

    return VideoTask(config, data, device)
