"""What the suite "step" trains: models for video and text, at one shape, with the formula of their losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.bench.baselines.formulas import identity_losses, written_out_losses, written_out_text_losses
from cdt_fast.models import DUST, TextUT, VideoUT

# The losses `[L+1]` of a model for its inputs and targets.
Formula = Callable[[Any, Tensor, Tensor], Tensor]
Weights = Tensor | Sequence[float]  # of the depths; numbers where the host knows them

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class VideoWork:
    """A model that denoises: `sequences` B of `window` T tokens, `patch` n numbers each; codes of width `code` m."""

    family: str
    sequences: int
    window: int = 20
    patch: int = 256
    code: int = 1024
    layers: int = 5
    tied: bool = True
    readout: str = "own"

    # By dtype, the largest relative difference from the formula that is rounding.
    tolerances: ClassVar[Mapping[str, float]] = {"float32": 1e-4, "bfloat16": 3e-2}
    # The losses as everyone would write them first, and in eager torch otherwise, by name.
    formula: ClassVar[Formula] = staticmethod(written_out_losses)
    other_formulas: ClassVar[Mapping[str, Formula]] = {"eager by the identity": identity_losses}

    @property
    def title(self) -> str:
        return f"{self.family} {'tied' if self.tied else f'untied, {self.readout} readout'}"

    @property
    def shape(self) -> dict[str, int]:
        return {"B": self.sequences, "T": self.window, "n": self.patch, "m": self.code, "L": self.layers}

    @property
    def items(self) -> int:
        """What a loss is a mean over."""
        return self.sequences * self.window

    @property
    def flop(self) -> float:
        """Of forward and backward by the identity, without forming H_0: products of tokens with the dictionary, the
        small ones of the attention, and the n by n map of the first depth."""
        # An untied model that reads with its own dictionaries projects the codes between layers on two of them.
        large = 6 * self.layers + (0 if self.tied or self.readout == "next" else 3 * (self.layers - 1))
        attention = 5 * self.layers * self.patch + 3 * (self.layers - 1) * self.code
        return 2.0 * self.items * (large * self.patch * self.code + self.window * attention + 2 * self.patch**2)

    def moved(self, dtype: str) -> float:
        """Bytes of what each layer reads and writes once, forward and backward: codes, projections, signals and their
        gradients."""
        return float(getattr(torch, dtype).itemsize * self.items * (6 * self.code + 10 * self.patch) * self.layers)

    def build(self, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[DUST, Tensor, Tensor]:
        """The same model, noisy and clean tokens `[B, T, n]` whatever the device; the losses of its depths differ."""
        generator = torch.Generator().manual_seed(0)
        arguments: dict[str, Any] = {"tied": self.tied, "readout": self.readout}
        model = {"DUST": DUST, "VideoUT": VideoUT}[self.family](self.patch, self.code, self.layers, **arguments)
        with torch.no_grad():  # no two dictionaries alike, so that a gradient cannot land in the wrong one unseen
            model.dictionary += 0.01 * torch.randn(model.dictionary.shape, generator=generator)
        # Patches with some structure over time, so that attention and shrinkage have something to do.
        still = torch.rand(self.sequences, 1, self.patch, generator=generator)
        clean = still + 0.02 * torch.randn(self.sequences, self.window, self.patch, generator=generator)
        noisy = clean + 0.05 * torch.randn(clean.shape, generator=generator)
        return model.to(device, dtype), noisy.to(device, dtype), clean.to(device, dtype)

    def last_loss(self, model: DUST, noisy: Tensor, clean: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        """`(total, per_layer [1])` of the last depth, as a training without constraints would compute it."""
        return ops.layerwise_reconstruction_loss([model(noisy)], clean, depth_weights=weights[-1:])


@dataclass(frozen=True)
class TextWork:
    """TextUT, which classifies texts: `texts` B of `tokens` T without padding, tokens and Z of width d."""

    texts: int
    tokens: int
    width: int
    layers: int = 3
    vocabulary: int = 8000
    classes: int = 2

    # In bfloat16 eager torch itself is off by 2.1e-2 at the size for a CPU: ReLUs switch where rounding moves a zero.
    tolerances: ClassVar[Mapping[str, float]] = {"float32": 1e-4, "bfloat16": 4e-2}
    formula: ClassVar[Formula] = staticmethod(written_out_text_losses)
    other_formulas: ClassVar[Mapping[str, Formula]] = {}
    title: ClassVar[str] = "TextUT"

    @property
    def shape(self) -> dict[str, int]:
        return {"B": self.texts, "T": self.tokens, "d": self.width, "L": self.layers, "V": self.vocabulary}

    @property
    def items(self) -> int:
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
        # Not as many of each class: the gradient of the head's bias would be a small difference of large sums, in which
        # bfloat16 leaves noise whoever computes it.
        labels = torch.randint(self.classes, (self.texts,), generator=generator)
        labels[: self.texts // 2] = 0
        return model.to(device, dtype), ids.to(device), labels.to(device)

    def last_loss(self, model: TextUT, ids: Tensor, labels: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        """`(total, per_layer [1])` of the last depth, as a training without constraints would compute it."""
        loss = torch.nn.functional.cross_entropy(model(ids).float(), labels)
        return loss, loss.detach()[None]


Trained = VideoWork | TextWork
