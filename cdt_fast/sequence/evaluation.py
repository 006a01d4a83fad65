"""What a trained network does on held-out texts: accuracy over γ, and the losses of every depth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.progress import progress_bar
from cdt_fast.sequence.losses import EVALUATION_SEED, perturbation_arguments
from cdt_fast.sequence.networks import Network
from cdt_fast.sequence.perturbation import evaluate_classifier
from cdt_fast.sequence.samples import IGNORED, EncodedSamples
from cdt_fast.sequence.settings import SequenceSettings
from cdt_fast.training.results import Evaluation

_LARGEST_EXPONENT = 700.0  # above it a perplexity is no float


class SequenceEvaluation(Evaluation):
    """What the `evaluation.json` of a run on texts or instructions holds: what `evaluate_classifier` measures."""

    perturbation: str
    accuracy: list[float]
    accuracy_interval: list[tuple[float, float]]
    auc: float | None
    depth_accuracy: list[list[float]]
    depth_loss: list[list[float]]
    answers: int
    test_texts: int
    test_digest: str

    def sizes(self) -> dict[str, int]:
        names = ("accuracy", "accuracy_interval", "depth_accuracy", "depth_loss")
        return dict.fromkeys(names, len(self.gamma))


class TextEvaluation(SequenceEvaluation):
    """The `evaluation.json` of a run on labeled texts."""

    classes: list[str]


class LanguageEvaluation(SequenceEvaluation):
    """The `evaluation.json` of a language model, whose accuracy is that of its tokens."""

    perplexity: list[float]
    vocabulary: int

    def sizes(self) -> dict[str, int]:
        return {**super().sizes(), "perplexity": len(self.gamma)}


def measure(
    network: Network, test: EncodedSamples, settings: SequenceSettings, device: torch.device, progress: bool = True
) -> dict[str, Any]:
    """What `evaluate_classifier` measures of a network on `device`, and how many parameters it has."""
    gammas = settings.evaluation.gammas
    passes = len({*gammas, settings.data.gamma})
    with progress_bar(total=passes * len(test), desc="evaluate", unit="sample", shown=progress) as bar:
        measured = evaluate_classifier(
            network.model,
            _Batches(network, test, settings.training.batch, device, bar),  # pyright: ignore[reportArgumentType]
            lambda inputs: network.depth_logits(*inputs),
            gammas=gammas,
            training_gamma=settings.data.gamma,
            seed=EVALUATION_SEED,
            **perturbation_arguments(settings, network),
        )
    parameters = sum(parameter.numel() for parameter in network.model.parameters())
    return {**measured, "perturbation": settings.data.perturbation, "parameters": parameters}


def perplexities(measured: dict[str, Any]) -> list[float]:
    """`exp(ℓ_L)` at every noise level."""
    return [math.exp(min(losses[-1], _LARGEST_EXPONENT)) for losses in measured["depth_loss"]]


class _Batches:
    """`((inputs, targets), labels in their own places)`, gone through once a noise level."""

    def __init__(self, network: Network, samples: EncodedSamples, size: int, device: torch.device, bar: Any) -> None:
        self._network, self._samples, self._size, self._device, self._bar = network, samples, size, device, bar

    def __iter__(self) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
        for inputs, targets, _ in self._samples.batches(self._size, self._network.padding_id, self._device):
            # The label of a token is the next one, as language models shift them.
            labels = targets if targets.dim() == 1 else nn.functional.pad(targets, (0, 1), value=IGNORED)[:, 1:]
            yield (inputs, targets), labels
            self._bar.update(len(targets))
