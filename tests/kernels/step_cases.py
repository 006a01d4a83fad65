"""Training steps at toy size on a GPU, with the package's core alone: no data, no accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cdt_fast import models
from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.training.cuda_graph import CapturedStep, CudaGraphs
from cdt_fast.training.optimizer import TrainingStep, build_optimizer
from cdt_fast.video.networks import ReconstructionLosses

PATCH, CODES, LAYERS, TIME = 64, 96, 3, 20
# The sequences of the micro-batches of a step: the third is the smaller one that ends an epoch.
EPOCH = ((12,), (12,), (5,))
ACCUMULATED = ((8, 4), (8, 4), (5,))

MODELS: dict[str, tuple[type[models.DUST], dict[str, Any]]] = {
    "tied": (models.DUST, {"tied": True, "sparsity": 0.02}),
    "untied": (models.DUST, {"sparsity": 0.02, "readout": "next"}),
    "VideoUT": (models.VideoUT, {"readout": "own"}),
}
CONSTRAINTS: dict[str, dict[str, Any] | None] = {
    "unconstrained": None,
    "adam": {"reference": "auto", "normalize": True},
    "ascent": {"reference": 0.5, "betas": None, "resilience": "decay"},
    "absolute": {"reference": 0.5, "betas": None, "coupling": "absolute", "slack_cost": 5.0},
}
WARMUP = 4


@dataclass
class Steps:
    """A small training on the current GPU.

    Args:
        model: of `MODELS`.
        constraints: of `CONSTRAINTS`.
        captured: as CUDA graphs, else eagerly.
        precision: "fp32" or "bf16".
        epoch: `EPOCH` or `ACCUMULATED`.
    """

    model: str
    constraints: str
    captured: bool
    precision: str = "fp32"
    epoch: tuple[tuple[int, ...], ...] = EPOCH

    def __post_init__(self) -> None:
        device = torch.device("cuda")
        kind, options = MODELS[self.model]
        self.network = kind(PATCH, CODES, LAYERS, **options).to(device)
        self.optimizer, self.schedule = build_optimizer(
            self.network.parameters(), 1e-3, lambda step: 1 / (step + 1), on_device=True
        )
        settings = CONSTRAINTS[self.constraints]
        self.duals = None if settings is None else DescentConstraints(LAYERS, 0.5, **settings).to(device)
        self.logged_sums = torch.zeros(LAYERS + 2, dtype=torch.float64, device=device)
        self.step = TrainingStep(
            losses=ReconstructionLosses(self.network, torch.bfloat16 if self.precision == "bf16" else None),
            optimizer=self.optimizer,
            logged_sums=self.logged_sums,
            constraints=self.duals,
        )
        self.replays = CapturedStep(self._on_buffers, CudaGraphs(torch.device("cuda", 0))) if self.captured else None
        self.generator = torch.Generator(device).manual_seed(0)
        self.taken = 0

    def _on_buffers(self, *buffers: Tensor, counts: tuple[int, ...], update: bool) -> None:
        known = (*[0.0] * LAYERS, 1.0) if self.duals is None else None
        self.step.run(zip(buffers[::2], buffers[1::2], strict=True), counts, sum(counts), known, update)

    def _tokens(self, sequences: tuple[int, ...]) -> Iterator[Tensor]:
        """Patches that change slowly, noisy and clean."""
        for number in sequences:
            still = torch.rand((number, 1, PATCH), device="cuda", generator=self.generator)
            shape = (number, TIME, PATCH)
            clean = still + 0.02 * torch.randn(shape, device="cuda", generator=self.generator)
            yield clean + 0.1 * torch.randn(shape, device="cuda", generator=self.generator)
            yield clean

    def take(self, number: int) -> None:
        """That many steps."""
        for _ in range(number):
            sequences = self.epoch[self.taken % len(self.epoch)]
            counts = tuple(TIME * entry for entry in sequences)
            update = self.taken >= WARMUP
            if self.replays is None:
                self._on_buffers(*self._tokens(sequences), counts=counts, update=update)
            else:
                self.replays(*self._tokens(sequences), counts=counts, update=update)
            self.schedule.step()
            self.taken += 1

    def state(self) -> dict[str, Tensor]:
        """Weights, the optimizer's state, the duals and the sums of the losses, as copies."""
        found: dict[str, Tensor] = {"logged_sums": self.logged_sums, **self.network.state_dict()}
        for number, parameter in enumerate(self.network.parameters()):
            found |= {f"{number}.{name}": value for name, value in self.optimizer.state[parameter].items()}
        if self.duals is not None:
            duals = self.duals.state_dict()
            found |= {name: value for name, value in duals.items() if isinstance(value, Tensor)}
        return {name: value.detach().clone() for name, value in found.items()}
