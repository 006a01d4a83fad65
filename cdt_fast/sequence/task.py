"""What training on texts and on instructions share: rows of tokens, perturbed embeddings, losses by depth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.errors import InputError
from cdt_fast.sequence.networks import Network, vocabulary_size
from cdt_fast.sequence.perturbation import Perturbation, embedding_std, perturbed, word_embeddings
from cdt_fast.sequence.tokenizers import stacked
from cdt_fast.training.config import RunConfig

IGNORED = -100  # the label of what does not count
EVALUATION_SEED = 20_260_117  # noise of the evaluation: the same for every run, and apart from that of any training


@dataclass(frozen=True)
class EncodedSamples:
    """Samples as token ids.

    Attributes:
        rows: int64 `[planes, T]` each, as a `Reader` gives them.
        targets: int64, `[]` a class or `[T]` labels of tokens.
        counts: how many targets of each sample count.
    """

    rows: list[Tensor]
    targets: list[Tensor]
    counts: list[int]

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, chosen: Sequence[int], padding_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs `[planes, B, T]` and targets `[B]` or `[B, T]`, filled up with −100, on `device`."""
        inputs = stacked([self.rows[index] for index in chosen], padding_id)
        given = [self.targets[index] for index in chosen]
        targets = nn.utils.rnn.pad_sequence(given, batch_first=True, padding_value=IGNORED) if given[0].dim() else None
        return _moved(inputs, device), _moved(torch.stack(given) if targets is None else targets, device)

    def batches(self, size: int, padding_id: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Inputs, targets and how many of these count, `size` samples at a time, in order."""
        for start in range(0, len(self), size):
            chosen = range(start, min(start + size, len(self)))
            yield *self.batch(chosen, padding_id, device), sum(self.counts[index] for index in chosen)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    # From other memory the host would wait for the copy.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class SequenceLosses(nn.Module):
    """The network's losses as a forward, on embeddings that are perturbed in training.

    Args:
        network: the network.
        config: the settings: what the perturbation is, and how precisely to compute.

    Attributes:
        first_sample: the number of the first sample of the next forward, by which its noise is drawn.
        stride: by how much the number rises from one sample of the batch to the next.
    """

    def __init__(self, network: Network, config: RunConfig) -> None:
        super().__init__()
        self.model = network.model  # registered, so that a distributed wrapper sees its weights
        self.first_sample, self.stride = 0, 1
        self._network, self._config = network, config
        self._std: Tensor | None = None

    def forward(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """`(total, per_layer)`; see `Network.losses`."""
        bf16 = self._config.training.precision == "bf16"
        autocast = torch.autocast(inputs.device.type, torch.bfloat16) if bf16 else nullcontext()
        with autocast, self._perturbed():
            return self._network.losses(inputs, targets, weights)

    def _perturbed(self) -> AbstractContextManager[Any]:
        if self._config.data.gamma == 0:
            return nullcontext()
        # One seed for all: the numbers of the samples, which no two steps share, hold the run's.
        perturbing = perturbation_of(self._config, self._network, 0, self._embedding_std())
        return _numbered(perturbing, self.first_sample, self.stride)

    def _embedding_std(self) -> Tensor | None:
        """Of embeddings that do not train taken once; None: that of the moment."""
        table: Any = word_embeddings(self.model).weight
        if table.requires_grad:
            return None
        if self._std is None:
            self._std = embedding_std(table)
        return self._std


def perturbation_of(
    config: RunConfig, network: Network, seed: int, std: Tensor | None = None
) -> AbstractContextManager[Perturbation]:
    """`perturbed` by the settings, at the training noise."""
    return perturbed(
        network.model, gamma=config.data.gamma, seed=seed, std=std, **perturbation_arguments(config, network)
    )


def perturbation_arguments(config: RunConfig, network: Network) -> dict[str, Any]:
    """What `perturbed` and `evaluate_classifier` need to know besides γ and the seed."""
    return {
        "kind": config.data.perturbation,
        "rate": config.data.perturbation_rate,
        "special_ids": network.special_ids,
        "padding_id": network.padding_id,
    }


class SequenceTask:
    """See `Task`; a sample is a text or a sequence, and counts with its targets.

    Args:
        config: the settings.
        network: what trains.
        train, validation: the samples.
        identity: by what a resumed run knows its data again.
        lr: the learning rate where the settings name none.
        samples, subject, note: see `Task`.

    Raises:
        InputError: a sample holds an id that the model has no embedding of.
    """

    def __init__(
        self,
        config: RunConfig,
        network: Network,
        train: EncodedSamples,
        validation: EncodedSamples,
        identity: dict[str, Any],
        *,
        lr: float,
        samples: str,
        subject: str,
        note: str | None = None,
    ) -> None:
        for part in (train, validation):
            _check_ids(part, network)
        training = config.training
        self.network, self.model, self.layers = network, network.model, network.layers
        self.samples, self.subject, self.note = samples, subject, note
        self.training_samples = len(train)
        self.steps_per_epoch = math.ceil(len(train) / (training.batch * training.accumulate))
        self.steps: int = training.epochs * self.steps_per_epoch if training.steps is None else training.steps
        self.lr: float = lr if training.lr is None else training.lr
        self._config, self._train, self._validation, self._identity = config, train, validation, identity
        self._losses = SequenceLosses(network, config)

    def losses(self) -> nn.Module:
        return self._losses

    def count(self, sample: int) -> int:
        return self._train.counts[sample]

    def batch(self, chosen: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
        numbers = [number for _, number in chosen]
        self._losses.first_sample = numbers[0]
        self._losses.stride = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        return self._train.batch([sample for sample, _ in chosen], self.network.padding_id, device)

    @torch.no_grad()
    def validation_losses(self) -> list[float]:
        device = next(self.model.parameters()).device
        sums, counted = torch.zeros(self.layers + 1, dtype=torch.float64, device=device), 0
        with perturbation_of(self._config, self.network, EVALUATION_SEED):
            batches = self._validation.batches(self._config.training.batch, self.network.padding_id, device)
            for inputs, targets, count in batches:
                sums += self.network.losses(inputs, targets, None)[1].to(torch.float64) * count
                counted += count
        return (sums / counted).tolist()

    def data_identity(self) -> dict[str, Any]:
        return self._identity

    def save_model(self, folder: Path) -> None:
        self.network.save(folder)


def _check_ids(samples: EncodedSamples, network: Network) -> None:
    size = vocabulary_size(network.model)
    largest = max(int(row[0].max()) for row in samples.rows)
    if largest >= size:
        raise InputError(
            f"the tokenizer gives ids up to {largest}, but the model has {size} word embeddings: give a folder whose "
            "tokenizer belongs to its model"
        )


@contextmanager
def _numbered(perturbing: AbstractContextManager[Perturbation], first: int, stride: int) -> Iterator[Perturbation]:
    with perturbing as perturbation:
        perturbation.next_sample, perturbation.stride = first, stride
        yield perturbation
