"""What a trained network does on held-out texts: accuracy over γ, and whether every depth descends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.constraints.descent import DescentConstraints
from cdt_fast.progress import progress_bar
from cdt_fast.sequence.corpus import digest
from cdt_fast.sequence.networks import Network, vocabulary_size
from cdt_fast.sequence.perturbation import evaluate_classifier
from cdt_fast.sequence.task import EVALUATION_SEED, IGNORED, EncodedSamples, perturbation_arguments
from cdt_fast.sequence.text import encoded_texts, load_text_network
from cdt_fast.training.building import build_constraints, load_data
from cdt_fast.training.checkpoint import load_checkpoint, run_identity
from cdt_fast.training.config import RunConfig
from cdt_fast.training.run_folder import RunFolder

_LARGEST_EXPONENT = 700.0  # above it a perplexity is no float


def evaluate_sequences(run: RunFolder, config: RunConfig, progress: bool = True) -> dict[str, Any]:
    """Evaluate the model that a run on texts or instructions kept, judged by the constraints as its training left them.

    Returns:
        The content of `evaluation.json`: what `perturbation.evaluate_classifier` measures on the test samples (the
        accuracy of a language model is that of its tokens), the verdict of the constraints, of a language model the
        `perplexity` at each γ, and `trained_steps` of `steps`.

    Raises:
        InputError: the run's model, data or checkpoint cannot be read.
    """
    state = load_checkpoint(run.checkpoint, run=run_identity(config))
    data = load_data(config, progress)
    network, test, facts = _text(run, config, data) if config.task == "text" else _language(run, config, data)
    device = torch.device("cuda" if config.training.device != "cpu" and torch.cuda.is_available() else "cpu")
    network.model.to(device)
    constraints = build_constraints(config, data, "cpu", network.layers)
    constraints.load_state_dict(state["constraints"])
    measured = _measured(network, test, config, constraints, device, progress)
    return {**measured, **facts, "trained_steps": state["step"], "steps": state["steps"]}


def _text(run: RunFolder, config: RunConfig, data: Any) -> tuple[Network, EncodedSamples, dict[str, Any]]:
    reader, network, names = load_text_network(run.model, config, data.train.names)
    facts = {"classes": names, "test_texts": len(data.test), "test_digest": digest(data.test)}
    return network, encoded_texts(data.test.with_names(names), reader, config.data.max_tokens), facts


def _language(run: RunFolder, config: RunConfig, data: Any) -> tuple[Network, EncodedSamples, dict[str, Any]]:
    from cdt_fast.sequence.language import load_language_network

    encode, network = load_language_network(run.model, config)
    test = encode(data.test)
    facts = {"vocabulary": vocabulary_size(network.model), "test_texts": len(test), "test_digest": digest(data.test)}
    return network, test, facts


def _measured(
    network: Network,
    test: EncodedSamples,
    config: RunConfig,
    constraints: DescentConstraints,
    device: torch.device,
    progress: bool,
) -> dict[str, Any]:
    gammas = config.evaluation.gammas
    passes = len({*gammas, config.data.gamma})
    size = config.training.batch
    with progress_bar(total=passes * len(test), desc="evaluate", unit="sample", shown=progress) as bar:
        found = evaluate_classifier(
            network.model,
            _Batches(network, test, size, device, bar),  # pyright: ignore[reportArgumentType]
            lambda given: network.depth_logits(*given),
            gammas=gammas,
            training_gamma=config.data.gamma,
            seed=EVALUATION_SEED,
            **perturbation_arguments(config, network),
        )
    report = constraints.report(found["layer_loss"])
    verdict = report.as_dict()  # without numbers that JSON has no word for
    if config.task == "lm":
        found["perplexity"] = [math.exp(min(losses[-1], _LARGEST_EXPONENT)) for losses in found["depth_loss"]]
    return {
        "task": config.task,
        "model": config.model.model,
        "constrained": config.constraints.constrained,
        "parameters": sum(parameter.numel() for parameter in network.model.parameters()),
        "source": config.data.source,
        "perturbation": config.data.perturbation,
        **found,
        "layer_ratio": verdict["ratio"],
        "rate": constraints.rates.tolist(),
        "feasible": verdict["feasible"],
        "violation": verdict["violation"],
        "report": {**verdict, "text": str(report)},
    }


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
