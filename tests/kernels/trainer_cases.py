"""The trainer at toy size on a GPU; its import needs accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from cdt_fast.training.loop import Trainer
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.settings import VideoSettings
from tests.runs import new_trainer

# Whole frames on one grid of patches; of the settings all but these are the defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "data": {
        "frames": "resized",
        "patch_frames": 1,
        "gamma": 0.15,
        "size": 32,
        "patch": 8,
        "window": 5,
    },
    "model": {
        "nonlinearity": "soft_threshold",
        "sparsity": 0.2,
        "scale": 1.0,
        "code_size": 96,
        "layers": 2,
    },
    "constraints": {
        "objective": "last",
        "rate": 0.9,
        "margin": 0.1,
        "reference": "auto",
        "warmup_epochs": 2,
    },
    "training": {"device": "cuda", "steps": 30, "batch": 3, "lr": 1e-3, "validate_every": 10},
}


def trainer_on_gpu(folder: Path, patch: pytest.MonkeyPatch, changes: dict[str, Any], name: str = "run") -> Trainer:
    """A new trainer on a clip of 60 frames: eight training windows, so three, three and two a step."""
    clip = folder / "clip.npy"
    if not clip.exists():
        rows, columns = np.mgrid[0:32, 0:32]
        moving = [127 + 90 * np.sin((columns + index) / 3) * np.cos(rows / 5) for index in range(60)]
        np.save(clip, np.stack(moving).astype(np.uint8))
    config = VideoSettings()
    config.set("data", "source", str(clip))
    for section, values in SETTINGS.items():
        config.update(section, values)
    for setting, value in changes.items():
        section = next(entry for entry in SETTINGS if hasattr(getattr(config, entry), setting))
        config.set(section, setting, value)
    # Accelerate remembers the device of the process's first accelerator, which may have been a CPU test's.
    for state in (PartialState, AcceleratorState):
        patch.setattr(state, "_shared_state", {})
    run = RunFolder.create(folder / name, config)
    return new_trainer(run, config, accelerator=Accelerator())
