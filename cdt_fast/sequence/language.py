"""The task of answering instructions: a causal language model, whose every depth predicts the answer's tokens."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cdt_fast.sequence.data import Splits, digest, load_instructions
from cdt_fast.sequence.evaluation import SequenceEvaluation, accuracy_table, measure
from cdt_fast.sequence.networks import PretrainedNetwork, check_rows
from cdt_fast.sequence.settings import LanguageModelSettings, LanguageSettings
from cdt_fast.sequence.task import SequenceWorkload, check, described, reported
from cdt_fast.sequence.tokenizers import encoded_instructions, load_model, load_tokenizer
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.task import EvaluatedRun, Report

Evaluation = SequenceEvaluation
SAMPLES = "sequences"
BF16_ON_CPU = FIXED_SHAPES = False


def load(settings: LanguageSettings, progress: bool = True) -> Splits:
    check(settings)
    return load_instructions(settings)


def build(settings: LanguageSettings, data: Splits, device: torch.device) -> SequenceWorkload:
    chosen, max_tokens = settings.model, settings.data.max_tokens
    network = _network(str(chosen.model), chosen, chosen.download)
    samples = [
        encoded_instructions(part, network.tokenizer, max_tokens, name)
        for part, name in zip(data[:3], Splits._fields, strict=False)
    ]
    given, end = sum(map(len, data[:3])), network.tokenizer.eos_token_id
    rows = [row for part in samples for row in part.rows]
    counts = {
        "left out, as nothing of their answers is within --max-tokens": given - len(rows),
        "answers cut short by --max-tokens": sum(int(row[0, -1]) != end for row in rows),
    }
    description = described(settings, data, "instructions", "without an answer")
    description += "".join(f"\n{text}: {count:,} of {given:,}" for text, count in counts.items() if count)
    return SequenceWorkload(settings, network, samples, description, guess_loss=math.log(network.vocabulary), lr=2e-5)


def evaluate(folder: RunFolder, settings: LanguageSettings, data: Splits) -> dict[str, Any]:
    network = _network(folder.model, settings.model)
    test = encoded_instructions(data.test, network.tokenizer, settings.data.max_tokens, "test")
    check_rows(network, (test,), settings)
    measured = measure(network, test, settings, BF16_ON_CPU)
    return {**measured, "vocabulary": network.vocabulary, "test_digest": digest(data.test)}


def report(runs: Sequence[EvaluatedRun]) -> Report:
    perplexity = [["perplexity", *(f"γ {gamma:g}" for gamma in runs[0].evaluation.gamma)]]
    for run in runs:
        losses = [depths[-1] for depths in run.evaluation.depth_loss]
        perplexity.append([run.label, *(f"{math.exp(min(loss, 700.0)):.4g}" for loss in losses)])
    return reported(runs, [perplexity, accuracy_table(runs, "accuracy of tokens")])


def _network(name: str | Path, settings: LanguageModelSettings, download: bool = False) -> PretrainedNetwork:
    tokenizer, model = load_tokenizer(name, download), load_model("AutoModelForCausalLM", name, download)
    return PretrainedNetwork(model, tokenizer, settings.taps)
