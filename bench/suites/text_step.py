"""The whole training step of TextUT, as the suite "step" takes it of the models for video."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cdt_fast.bench.baselines.written_out_text import written_out_text_losses
from cdt_fast.bench.case import Case, Way
from cdt_fast.bench.suites.step import (
    CONSTRAINED,
    LAST,
    LOGGED,
    Losses,
    expected_of,
    last_only,
    prepared,
    weighted,
)
from cdt_fast.models import TextUT

# In bfloat16 eager torch itself is off by 4.4e-2 at the size for a CPU: ReLUs switch where rounding moves a zero.
TOLERANCES = {"float32": 1e-4, "bfloat16": 6e-2}


@dataclass(frozen=True)
class TextWork:
    """What is trained.

    Attributes:
        texts, tokens: B and T; no text has padding.
        width: d, and the width k of Z.
        layers: L.
        vocabulary, classes: of the embeddings and of the head.
    """

    texts: int
    tokens: int
    width: int
    layers: int = 3
    vocabulary: int = 8000
    classes: int = 2

    @property
    def shape(self) -> dict[str, int]:
        """The sizes by the names of the formulas."""
        return {"B": self.texts, "T": self.tokens, "d": self.width, "L": self.layers, "V": self.vocabulary}

    @property
    def items(self) -> int:
        """What a loss is a mean over."""
        return self.texts

    @property
    def flop(self) -> float:
        """Of forward and backward: two maps of the tokens a layer, three products each; of the attention two products
        forward and three backward."""
        rows, d = self.texts * self.tokens, self.width
        return 2.0 * rows * self.layers * (6 * d**2 + 5 * self.tokens * d)

    def moved(self, dtype: str) -> float:
        """Bytes of what each layer reads and writes once, forward and backward: tokens, projections, mixed tokens."""
        return 2.0 * getattr(torch, dtype).itemsize * self.texts * self.tokens * 4 * self.width * self.layers

    def build(self, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[TextUT, Tensor, Tensor]:
        """The same model, ids `[B, T]` and labels `[B]` whatever the device."""
        generator = torch.Generator().manual_seed(0)
        model = TextUT((self.vocabulary, self.width), self.classes, self.layers)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (0.02 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))
        ids = torch.randint(self.vocabulary, (self.texts, self.tokens), generator=generator)
        labels = torch.randint(self.classes, (self.texts,), generator=generator)
        return model.to(device, dtype), ids.to(device), labels.to(device)


WORKS = {
    "toy": TextWork(3, 7, 16, layers=2, vocabulary=30),
    "cpu": TextWork(32, 128, 384),
    "gpu": TextWork(256, 256, 768),
}


def text_cases(device: torch.device, size: str) -> Iterator[Case]:
    """The constrained step against eager torch, and against the unconstrained one."""
    work = WORKS[size]
    for dtype in TOLERANCES:
        yield _case(work, device, dtype, "constrained", _against_eager(work, device, dtype))
        yield _case(
            work, device, dtype, "constrained against unconstrained", _against_unconstrained(work, device, dtype)
        )


def fused(model: TextUT, ids: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The model's own losses, of all depths."""
    return model.layer_losses(ids, labels, weights)


def fused_last(model: TextUT, ids: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of the last depth, as a training without constraints would compute it."""
    loss = torch.nn.functional.cross_entropy(model(ids).float(), labels)
    return loss, loss.detach()[None]


def _against_eager(work: TextWork, device: torch.device, dtype: str) -> tuple[Way, ...]:
    autocast = dtype == "bfloat16"

    def way(name: str, role: str, losses: Losses) -> Way:
        return Way(name, role, prepared(work, losses, device, CONSTRAINED, autocast))

    return way("eager", "eager", weighted(written_out_text_losses)), way("cdt_fast", "ours", fused)


def _against_unconstrained(work: TextWork, device: torch.device, dtype: str) -> tuple[Way, ...]:
    autocast = dtype == "bfloat16"
    every = weighted(written_out_text_losses)

    def way(name: str, role: str, losses: Losses, reads: str, expected: Losses) -> Way:
        step = prepared(work, losses, device, reads, autocast)
        return Way(name, role, step, expected_of(work, device, reads, expected))

    return (
        way("unconstrained", "eager", fused_last, LAST, last_only(every)),
        way("unconstrained, all depths logged", "peer", fused, LOGGED, every),
        way("constrained", "ours", fused, CONSTRAINED, every),
    )


def _case(work: TextWork, device: torch.device, dtype: str, what: str, ways: tuple[Way, ...]) -> Case:
    return Case(
        suite="step",
        name=f"TextUT, {what}, {dtype}",
        shape=work.shape,
        dtype=dtype,
        ways=ways,
        expected=expected_of(work, device, CONSTRAINED, weighted(written_out_text_losses)),
        tolerance=TOLERANCES[dtype],
        flop=work.flop,
        moved=work.moved(dtype),
    )
