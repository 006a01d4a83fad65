"""Time to quality: a short training of DUST on the drawn demo clip, until held-out frames are denoised well enough.

All train the same network from the same weights on the same windows and noise, and stop at the first validation whose
loss of the last depth is at the target. What never gets there is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cdt_fast import DescentConstraints
from cdt_fast.bench.baselines.formulas import written_out_losses
from cdt_fast.bench.case import Case, Implementation, Step
from cdt_fast.bench.suites.training_step import Losses, fused, weighted
from cdt_fast.models import DUST
from cdt_fast.video.data.demo import demo_clip
from cdt_fast.video.data.noise import add_noise
from cdt_fast.video.data.patches import to_patches

_NOISE = 0.5


@dataclass(frozen=True)
class Plan:
    """A short training.

    Attributes:
        frames, side: of the clip.
        window, patch, code, layers, windows: T, √n, m, L, and the windows of a step.
        target: share of the noisy frames' own error that the held-out loss has to fall to.
        validate_every, most_steps: steps between two validations, and before an implementation is given up.
    """

    frames: int
    side: int
    window: int
    patch: int
    code: int
    layers: int
    windows: int
    target: float
    validate_every: int
    most_steps: int


PLANS = {
    "toy": Plan(30, 32, 5, 8, 96, 2, 2, target=10.0, validate_every=2, most_steps=20),
    "cpu": Plan(400, 96, 20, 16, 512, 3, 1, target=0.45, validate_every=5, most_steps=400),
    "gpu": Plan(400, 160, 20, 16, 1024, 5, 8, target=0.6, validate_every=5, most_steps=400),
}


class Frames:
    """Tokens of the clip's windows, noisy and clean: the last fifth is held out.

    Args:
        plan: the training.
        device: where the tokens are.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        clip = torch.from_numpy(demo_clip(plan.frames, plan.side)).float() / 255
        whole = clip[: len(clip) // plan.window * plan.window].reshape(-1, plan.window, plan.side, plan.side)
        generator = torch.Generator().manual_seed(0)
        noisy = add_noise(whole, _NOISE, whole.std().item(), generator)
        held_out = max(1, len(whole) // 5)
        self.training = [
            (to_patches(noisy[index : index + 1], plan.patch).to(device), to_patches(clean, plan.patch).to(device))
            for index, clean in enumerate(whole[:-held_out].split(1))
        ]
        self.held_out = tuple(to_patches(part[-held_out:], plan.patch).to(device) for part in (noisy, whole))
        noisy_tokens, clean_tokens = self.held_out
        self.noisy_loss = (noisy_tokens - clean_tokens).square().sum(-1).mean().item()


class Training:
    """Trains from the beginning to the target once a call; returns the held-out loss, no lower than the target.

    Args:
        plan: the training.
        losses: how its losses are computed.
        constrained: whether the descent constraints act.
        device: where it runs.
    """

    def __init__(self, plan: Plan, losses: Losses, constrained: bool, device: torch.device) -> None:
        self._plan, self._losses, self._constrained, self._device = plan, losses, constrained, device
        self._frames = Frames(plan, device)
        self._target = plan.target * self._frames.noisy_loss
        self.facts: dict[str, float] = {}

    def __call__(self) -> list[Tensor]:
        plan, frames = self._plan, self._frames
        model = DUST(plan.patch**2, plan.code, plan.layers, readout="next").to(self._device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        constraints = DescentConstraints.preset("safe", plan.layers, device=self._device) if self._constrained else None
        last = torch.eye(plan.layers + 1, device=self._device)[-1]
        order = torch.Generator().manual_seed(0)
        loss = float("inf")
        steps = 0
        while loss > self._target and steps < plan.most_steps:
            chosen = torch.randperm(len(frames.training), generator=order)[: plan.windows].tolist()
            noisy, clean = (torch.cat([frames.training[index][part] for index in chosen]) for part in (0, 1))
            weights = last if constraints is None else constraints.weights()
            optimizer.zero_grad(set_to_none=True)
            total, per_layer = self._losses(model, noisy, clean, weights)
            total.backward()
            optimizer.step()
            if constraints is not None:
                count = clean.shape[:-1].numel()
                constraints.record(per_layer, count)
                constraints.step()
            steps += 1
            if steps % plan.validate_every == 0:
                with torch.no_grad():
                    loss = self._losses(model, *self.held_out, last)[1][-1].item()
        self.facts = {"steps": steps, "held-out loss": loss, "target": self._target}
        return [torch.tensor(max(loss, self._target), dtype=torch.float64)]

    @property
    def held_out(self) -> tuple[Tensor, Tensor]:
        """Noisy and clean tokens that no step sees."""
        noisy, clean = self._frames.held_out
        return noisy, clean


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """One training, by eager torch and by `cdt_fast`, constrained, and by `cdt_fast` without constraints."""
    plan = PLANS[size]

    def prepared(losses: Losses, constrained: bool) -> Callable[[], Step]:
        return lambda: Training(plan, losses, constrained, device)

    def expected() -> list[Tensor]:
        return [torch.tensor(plan.target * Frames(plan, device).noisy_loss, dtype=torch.float64)]

    positions = (plan.side // plan.patch) ** 2
    shape = {"B": plan.windows * positions, "T": plan.window, "n": plan.patch**2, "m": plan.code, "L": plan.layers}
    yield Case(
        suite="quality",
        name="DUST untied, next readout, on the demo clip to a given held-out loss, float32",
        shape=shape,
        dtype="float32",
        implementations=(
            Implementation("eager, constrained", "eager", prepared(weighted(written_out_losses), True)),
            Implementation("cdt_fast, unconstrained", "peer", prepared(fused, False)),
            Implementation("cdt_fast, constrained", "ours", prepared(fused, True)),
        ),
        expected=expected,
        tolerance=1e-9,
        note=f"noise {_NOISE:g} σ, to {plan.target:g} of the noisy frames' squared error on windows that no step sees",
        with_memory=False,
    )
