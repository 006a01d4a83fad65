"""Names and numbers that the settings show and the code behind them uses; without torch, for `cdt-fast --help`."""

from __future__ import annotations

from typing import Any

_PAPER: dict[str, Any] = {"dual": "adam", "betas": (0.9, 0.999), "resilience": "slack", "coupling": "chain"}
PRESETS: dict[str, dict[str, Any]] = {
    "paper-video": {**_PAPER, "rate": 0.25, "reference": 6.5, "reference_mode": "constraint"},
    "paper-text": {**_PAPER, "rate": 0.1, "reference": 0.9, "reference_mode": "anchor"},
    "paper-llm": {**_PAPER, "rate": 0.05, "reference": 12.0, "reference_mode": "anchor"},
    "safe": {
        "reference": "auto",
        "dual": "adam",
        "betas": (0.0, 0.999),
        "resilience": "decay",
        "coupling": "detach",
        "normalize": True,
    },
}

DISTRIBUTIONS = ("gaussian", "laplace", "uniform")
TOKEN_KINDS = ("drop", "swap")
KINDS = (*DISTRIBUTIONS, *TOKEN_KINDS)
GAMMAS = tuple(0.25 * step for step in range(9))  # 0 to 2, over which the paper's AUC is taken
