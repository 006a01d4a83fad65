"""The losses of a network that reads tokens, on word embeddings that are perturbed in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.sequence.networks import Network
from cdt_fast.sequence.perturbation import Perturbation, embedding_std, perturbed, word_embeddings
from cdt_fast.sequence.settings import SequenceSettings

EVALUATION_SEED = 20_260_117  # noise of the evaluation: the same for every run, and apart from that of any training


class SequenceLosses(nn.Module):
    """The network's losses as a forward, on embeddings that are perturbed in training.

    Args:
        network: the network.
        settings: what the perturbation is.
        autocast: the dtype of the matrix products; None: that of the weights.
    """

    def __init__(self, network: Network, settings: SequenceSettings, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model = network.model  # registered, so that a distributed wrapper sees its weights
        self._network, self._settings, self._autocast = network, settings, autocast
        self._std: Tensor | None = None

    def forward(
        self, inputs: Tensor, targets: Tensor, seeds: Tensor, weights: Tensor | Sequence[float] | None
    ) -> tuple[Tensor, ...]:
        """See `Network.losses`; `seeds` `[B]` are those of the samples' noise."""
        with autocast_to(self._autocast, inputs.device), self._perturbed(seeds):
            return self._network.losses(inputs, targets, weights)

    def _perturbed(self, seeds: Tensor) -> AbstractContextManager[Any]:
        if self._settings.noise == (0, 0):
            return nullcontext()
        # One seed for all: the numbers of the samples, which no two steps share, hold the run's.
        return _numbered(perturbation_of(self._settings, self._network, 0, self._embedding_std()), seeds)

    def _embedding_std(self) -> Tensor | None:
        """Of embeddings that do not train taken once; None: that of the moment."""
        table: Any = word_embeddings(self.model).weight
        if table.requires_grad:
            return None
        if self._std is None:
            self._std = embedding_std(table)
        return self._std


def autocast_to(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast to `dtype` on `device`; None: none."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def perturbation_of(
    settings: SequenceSettings, network: Network, seed: int, std: Tensor | None = None
) -> AbstractContextManager[Perturbation]:
    """`perturbed` by the settings, at the training noise."""
    return perturbed(
        network.model, gamma=settings.noise, seed=seed, std=std, **perturbation_arguments(settings, network)
    )


def perturbation_arguments(settings: SequenceSettings, network: Network) -> dict[str, Any]:
    """What `perturbed` and `evaluate_classifier` need to know besides γ and the seed."""
    return {
        "kind": settings.data.perturbation,
        "rate": settings.data.perturbation_rate,
        "special_ids": network.special_ids,
        "padding_id": network.padding_id,
    }


@contextmanager
def _numbered(perturbing: AbstractContextManager[Perturbation], samples: Tensor) -> Iterator[Perturbation]:
    with perturbing as perturbation:
        perturbation.samples = samples
        yield perturbation
