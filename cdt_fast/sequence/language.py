"""The task of answering instructions: a causal language model, whose every depth predicts the answer's tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cdt_fast.sequence.data import Splits, load_instructions
from cdt_fast.sequence.evaluation import accuracy_table
from cdt_fast.sequence.networks import Network, PretrainedNetwork
from cdt_fast.sequence.settings import LanguageModelSettings, LanguageSettings
from cdt_fast.sequence.task import SequenceTask, SequenceWorkload
from cdt_fast.sequence.tokenizers import EncodedSamples, encoded_instructions, load_model, load_tokenizer
from cdt_fast.training.task import EvaluatedRun, Table


class LanguageTask(SequenceTask):
    """See `training.task.Task`."""

    name, samples, subject, sample = "lm", "sequences", "instructions", "sequence"
    dropped = "without an answer"

    def load(self, settings: LanguageSettings, progress: bool = True) -> Splits:
        return load_instructions(settings)

    def build(self, settings: LanguageSettings, data: Splits, device: torch.device) -> SequenceWorkload:
        chosen, max_tokens = settings.model, settings.data.max_tokens
        network = _network(str(chosen.model), chosen, chosen.download)
        samples = [
            encoded_instructions(part, network.tokenizer, max_tokens, name)
            for part, name in zip(data[:3], Splits._fields, strict=False)
        ]
        given, kept = len(data.train), len(samples[0])
        left_out = f"left out, as nothing of their answers is within --max-tokens: {given - kept:,} of {given:,}"
        note = left_out if given > kept else None
        return SequenceWorkload(settings, network, samples, data, choices=network.vocabulary, lr=2e-5, note=note)

    def kept(
        self, folder: Path, settings: LanguageSettings, data: Splits
    ) -> tuple[Network, EncodedSamples, dict[str, Any]]:
        network = _network(folder, settings.model)
        test = encoded_instructions(data.test, network.tokenizer, settings.data.max_tokens, "test")
        return network, test, {"vocabulary": network.vocabulary}

    def tables(self, runs: Sequence[EvaluatedRun]) -> list[Table]:
        rows = [["perplexity", *(f"γ {gamma:g}" for gamma in runs[0].evaluation.gamma)]]
        for run in runs:
            losses = [depths[-1] for depths in run.evaluation.depth_loss]
            rows.append([run.label, *(f"{math.exp(min(loss, 700.0)):.4g}" for loss in losses)])
        return [rows, accuracy_table(runs, "accuracy of tokens")]


def _network(name: str | Path, settings: LanguageModelSettings, download: bool = False) -> PretrainedNetwork:
    tokenizer, model = load_tokenizer(name, download), load_model("AutoModelForCausalLM", name, download)
    return PretrainedNetwork(model, tokenizer, settings.taps, inner_fraction=settings.inner_fraction)
