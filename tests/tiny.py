"""Settings and a clip for runs of a few milliseconds a step."""

from __future__ import annotations

from typing import Any

import numpy as np

# Small enough for a step of a few milliseconds. The CPU also where a GPU is: results are compared bit by bit.
# What a test's numbers rest on is written out, so that other defaults do not move them.
_CONSTRAINTS: dict[str, Any] = {"objective": "last", "coupling": "chain", "reference_mode": "constraint"}
_CONSTRAINTS |= {"rate": 0.3, "reference": "auto", "margin": 0.0, "normalize": False, "resilience": "slack"}
_CONSTRAINTS |= {"dual_lr": 0.01, "betas": [0.0, 0.999], "slack_cost": 1.0, "warmup_epochs": 1}
TINY: dict[str, dict[str, Any]] = {
    "data": {"frames": "resized", "size": 32, "patch": 8, "patch_frames": 1, "window": 5, "gamma": 0.15},
    "model": {"code_size": 64, "layers": 2, "sparsity": 0.2, "scale": 1.0},
    "constraints": _CONSTRAINTS,
    "training": {
        "steps": 6,
        "batch": 2,
        "device": "cpu",
        "precision": "fp32",
        "lr": 0.01,
        "schedule": "cosine",
        "validate_every": 2,
    },
    "evaluation": {"gammas": [0.15, 0.5]},
}


def scrolling_clip(frames: int = 60, height: int = 32, width: int = 32) -> np.ndarray:
    """uint8 [frames, height, width]: a smooth picture that scrolls and slowly changes its light."""
    rows, columns = np.mgrid[0:height, 0:width]
    picture = 127 + 60 * np.sin(columns / 3) + 40 * np.cos(rows / 5)
    moving = [np.roll(picture, index // 2, axis=1) + 10 * np.sin(index / 7) for index in range(frames)]
    return np.clip(np.stack(moving), 0, 255).astype(np.uint8)


def words_of_command(settings: dict[str, dict[str, Any]], **changes: Any) -> list[str]:
    """Settings as words of a command line, some replaced."""
    values = {name: value for section in settings.values() for name, value in section.items()} | changes
    words = []
    for name, value in values.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words.append(f"--{option}={','.join(map(str, value)) if isinstance(value, list) else value}")
    return words
