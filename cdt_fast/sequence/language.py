"""The task of answering instructions: a causal language model, whose every depth predicts the answer's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cdt_fast.checks import InputError, require
from cdt_fast.models.transformers_weights import load_complete
from cdt_fast.sequence.data import Instruction, Splits, load_instructions
from cdt_fast.sequence.evaluation import accuracy_table, perplexities, perplexity_table
from cdt_fast.sequence.networks import Network, PretrainedNetwork, unknown_words
from cdt_fast.sequence.settings import SMALL, LanguageModelSettings, LanguageSettings
from cdt_fast.sequence.task import SequenceTask, SequenceWorkload
from cdt_fast.sequence.tokenizers import (
    EncodedSamples,
    byte_pair_tokenizer,
    encoded_instructions,
    from_hub,
    load_tokenizer,
    transformers_library,
)
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.task import EvaluatedRun, Table

_LR = {"small": 1e-3, "lora": 2e-4, "whole": 2e-5}
InstructionSplits = Splits[list[Instruction]]


class LanguageTask(SequenceTask):
    """See `training.task.Task`."""

    name, samples, subject, sample = "lm", "sequences", "instructions", "sequence"
    accuracy, dropped = "Accuracy of the tokens", "without an answer"

    def check(self, settings: LanguageSettings) -> None:
        super().check(settings)
        model = settings.model
        if model.lora_rank is not None:
            if model.model == SMALL:
                raise InputError(f"[model] lora_rank needs a pretrained model; the weights of {SMALL} are random")
            _peft()
        if model.model == SMALL and model.width % (2 * model.heads):
            raise InputError(f"[model] width must be a multiple of twice the heads ({model.heads}), got {model.width}")

    def load(self, settings: LanguageSettings, progress: bool = True) -> InstructionSplits:
        return load_instructions(settings)

    def describe(self, settings: LanguageSettings, data: InstructionSplits) -> str:
        return self.described(settings, data, "instructions")

    def build(self, settings: LanguageSettings, data: InstructionSplits, device: torch.device) -> SequenceWorkload:
        chosen, max_tokens, rank = settings.model, settings.data.max_tokens, settings.model.lora_rank
        if chosen.model == SMALL:
            texts = (text for entry in data.train for text in (entry.prompt, entry.output))
            tokenizer = byte_pair_tokenizer(texts, chosen.vocabulary_size)
            model = _small_llama(chosen, tokenizer, max_tokens)
        else:
            tokenizer, model = load_tokenizer(chosen.model, chosen.download), _load(chosen)
        if rank is not None:
            adapter = _peft().LoraConfig(r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM")
            model = _peft().get_peft_model(model, adapter)
        network = _network(model, tokenizer, chosen)
        parts = ("train", "validation", "test")
        samples = [encoded_instructions(getattr(data, part), tokenizer, max_tokens, part) for part in parts]
        given, kept = len(data.train), len(samples[0])
        short = sum(int(row[0, -1]) not in tokenizer.all_special_ids for row in samples[0].rows)
        notes = [
            f"left out, as nothing of their answers is within --max-tokens: {given - kept:,} of {given:,}"
            * (given > kept),
            f"answers cut short by --max-tokens: {short:,} of {given:,}" * (short > 0),
            unknown_words(tokenizer, samples[1:], "take another --model"),
        ]
        note = "\n".join(filter(None, notes)) or None
        lr = _LR["small" if chosen.model == SMALL else "whole" if rank is None else "lora"]
        return SequenceWorkload(settings, network, samples, data, choices=network.vocabulary, lr=lr, note=note)

    def kept(
        self, folder: Path, settings: LanguageSettings, data: InstructionSplits
    ) -> tuple[Network, EncodedSamples, dict[str, Any]]:
        if settings.model.lora_rank is None:
            with from_hub(folder) as where:
                model = load_complete(transformers_library().AutoModelForCausalLM, folder, **where)
        else:
            with from_hub(folder):
                model = _peft().PeftModel.from_pretrained(_load(settings.model), folder)
        tokenizer = load_tokenizer(folder)
        network = _network(model, tokenizer, settings.model)
        test = encoded_instructions(data.test, tokenizer, settings.data.max_tokens, "test")
        return network, test, {"vocabulary": network.vocabulary}

    def evaluate(self, folder: RunFolder, *given: Any, **options: Any) -> dict[str, Any]:
        measured = super().evaluate(folder, *given, **options)
        return {**measured, "perplexity": perplexities(measured)}

    def tables(self, runs: Sequence[EvaluatedRun]) -> list[Table]:
        return [perplexity_table(runs), accuracy_table(runs, "accuracy of tokens")]


def _peft() -> Any:
    return require("peft", "peft", "--lora-rank")


def _small_llama(settings: LanguageModelSettings, tokenizer: Any, max_length: int) -> Any:
    transformers = transformers_library()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.width,
        intermediate_size=4 * settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=max_length,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return transformers.LlamaForCausalLM(config)


def _load(settings: LanguageModelSettings) -> Any:
    with from_hub(settings.model, settings.download) as where:
        kind = transformers_library().AutoModelForCausalLM
        return load_complete(kind, settings.model, dtype=torch.float32, **where)


def _network(model: Any, tokenizer: Any, settings: LanguageModelSettings) -> PretrainedNetwork:
    return PretrainedNetwork(model, tokenizer, settings.taps, inner_fraction=settings.inner_fraction)
