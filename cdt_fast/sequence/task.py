"""Shared by the tasks on texts and on instructions: their workload, evaluation and report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError
from cdt_fast.ops.common import Weights, explain
from cdt_fast.sequence.data import Splits
from cdt_fast.sequence.evaluation import draw_accuracy
from cdt_fast.sequence.networks import Network, check_rows
from cdt_fast.sequence.settings import UNROLLED, SequenceSettings
from cdt_fast.sequence.tokenizers import EncodedSamples
from cdt_fast.training.execution import to_device
from cdt_fast.training.optimizer import build_constraints
from cdt_fast.training.task import EvaluatedRun, Report, Table


class SequenceLosses(nn.Module):
    """The network's losses as a forward, on embeddings that are perturbed in training."""

    def __init__(self, network: Network, settings: SequenceSettings, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model = network.model  # registered, so that a distributed wrapper sees its weights
        self._network, self._settings, self._autocast = network, settings, autocast

    def forward(self, inputs: Tensor, targets: Tensor, seeds: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        """Return `Network.losses`; `seeds` `[B]` are those of the samples' noise, and hold that of the run."""
        with torch.autocast(inputs.device.type, self._autocast, enabled=self._autocast is not None):
            if self._settings.data.gamma == 0:
                return self._network.losses(inputs, targets, weights)
            with self._network.perturbed(self._settings, seed=0, samples=seeds):
                return self._network.losses(inputs, targets, weights)


class SequenceWorkload:
    """A sample is a text or a sequence, and counts with its targets. `lr` is for settings that name none."""

    def __init__(
        self,
        settings: SequenceSettings,
        network: Network,
        samples: Sequence[EncodedSamples],
        description: str,
        *,
        guess_loss: float,
        lr: float,
    ) -> None:
        check_rows(network, samples, settings)
        training = settings.training
        self.network, self.model, self.num_constraints = network, network.model, network.layers
        self.description, self.guess_loss = description, guess_loss
        self.train, self.validation, _ = samples
        self.training_samples = len(self.train)
        self.steps: int = training.steps or training.epochs * settings.steps_per_epoch(len(self.train))
        self.lr: float = lr if training.lr is None else training.lr
        self._settings = settings

    def losses(self, autocast: torch.dtype | None) -> nn.Module:
        return SequenceLosses(self.network, self._settings, autocast)

    def count(self, sample: int) -> int:
        return self.train.counts[sample]

    def batch(self, chosen: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets and the seeds of the samples' noise `[B]`."""
        samples, seeds = zip(*chosen, strict=True)
        inputs, targets = self.train.batch(samples, self.network.padding_id, device)
        return inputs, targets, to_device(torch.tensor(seeds), device)

    @torch.no_grad()
    def validation_losses(self, autocast: torch.dtype | None) -> list[float]:
        device = next(self.model.parameters()).device
        sums = torch.zeros(self.num_constraints + 1, dtype=torch.float64, device=device)
        precision = torch.autocast(device.type, autocast, enabled=autocast is not None)
        with precision, self.network.perturbed(self._settings) as noise:
            batches = self.validation.batches(self._settings.training.batch, self.network.padding_id, device)
            for chosen, inputs, targets in batches:
                noise.samples = to_device(torch.tensor(chosen), device)
                count = sum(self.validation.counts[index] for index in chosen)
                sums += self.network.losses(inputs, targets, None)[1].to(torch.float64) * count
        return (sums / sum(self.validation.counts)).tolist()

    def validation_error(self, autocast: torch.dtype | None) -> None:
        return None

    def save_model(self, folder: Path) -> None:
        self.network.save(folder)

    def kernels(self, device: torch.device, dtype: torch.dtype) -> str:
        return f"ops on {explain() if device.type == 'cuda' else 'torch'}"


def check(settings: SequenceSettings) -> None:
    """Refuse settings that lack something, or do not fit each other, before any data are read."""
    for name, value in (("SOURCE", settings.data.source), ("--model", settings.model.model)):
        if value is None:
            raise InputError(f"{name} is missing: `cdt-fast train {settings.task} --help` shows an example")
    settings.check_noise()
    build_constraints(settings, _layers(settings))


def _layers(settings: SequenceSettings) -> int:
    """Return how many layers the settings speak of: a pretrained model is opened later."""
    chosen, taps = settings.constraints, getattr(settings.model, "taps", None)
    if settings.model.model == UNROLLED:
        return settings.model.layers
    rates = len(chosen.rate) if isinstance(chosen.rate, list) else max(1, *(chosen.bounds or [1]))
    return max(1, len(taps) - 1) if taps else rates


def described(settings: SequenceSettings, data: Splits, subject: str, dropped: str) -> str:
    """Say what the data are; `dropped` is what the rows lack that were dropped."""
    parts = ", ".join(f"{len(part):,} {name}" for part, name in zip(data[:3], Splits._fields, strict=False))
    note = f"; {data.num_dropped:,} {dropped} dropped" if data.num_dropped else ""
    return f"{settings.data.source}: {subject}: {parts}{note}"


def reported(runs: Sequence[EvaluatedRun], tables: list[Table]) -> Report:
    """Return the `Report` of runs with these tables."""
    values = runs[0].evaluation
    tokens = "" if values.answers == values.test_texts else f" with {values.answers:,} tokens to predict"
    choices = len(values.classes) if values.vocabulary is None else values.vocabulary
    return Report(
        conditions=f"Test texts: {values.test_texts:,}{tokens}, {values.seen_texts or 'none'} seen in training; "
        f"Gaussian noise on the word embeddings, in training γ = {runs[0].settings.shown_noise}. Accuracy with half of "
        f"its 95 % interval; area: that under accuracy over γ, by the trapezoid. Losses: cross-entropy in nats, at γ = "
        f"{values.training_gamma:g}.",
        # Losses of tokens of another vocabulary are not of one scale.
        must_agree={name: getattr(values, name) for name in ("vocabulary", "answers", "test_digest")},
        measure=f"loss at γ {values.training_gamma:g}",
        depths=values.layer_loss,
        references={f"a guess among {choices:,}": values.guess_loss or math.log(choices)},
        # A single text says nothing of chance.
        margins=values.layer_loss_margin or [math.inf] * len(values.layer_loss),
        tables=tables,
        pictures=[("Accuracy over γ", draw_accuracy)],
    )
