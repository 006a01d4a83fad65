"""The task of answering instructions: a causal language model, whose every depth predicts the answer's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cdt_fast.checks import InputError, require
from cdt_fast.checksums import check_folder
from cdt_fast.models.transformers_weights import load_complete
from cdt_fast.sequence import corpus
from cdt_fast.sequence.corpus import Instruction, InstructionSplits
from cdt_fast.sequence.evaluation import LanguageEvaluation, perplexities
from cdt_fast.sequence.figures import AGREEMENT, accuracy_table, depths_of, perplexity_table
from cdt_fast.sequence.limits import check_rows, unknown_words
from cdt_fast.sequence.networks import PretrainedNetwork, vocabulary_size
from cdt_fast.sequence.settings import SMALL, LanguageModelSettings, LanguageSettings
from cdt_fast.sequence.task import LoadedModel, SequenceTask, SequenceWorkload
from cdt_fast.sequence.tokenizers import (
    IGNORED,
    EncodedSamples,
    from_hub,
    learned_tokenizer,
    load_tokenizer,
    pretrained_library,
)
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.task import Drawing, EvaluatedRun, Summary, Table

_LR = {"small": 1e-3, "lora": 2e-4, "whole": 2e-5}


class LanguageTask(SequenceTask):
    """See `training.task.Task`."""

    name, samples, subject, sample = "lm", "sequences", "instructions", "sequence"
    accuracy = "Accuracy of the tokens"
    evaluation = LanguageEvaluation

    def check(self, settings: LanguageSettings) -> None:
        super().check(settings)
        model = settings.model
        if model.lora_rank is not None:
            if model.model == SMALL:
                raise InputError(f"[model] lora_rank needs a pretrained model; the weights of {SMALL} are random")
            require("peft", "peft", "--lora-rank")
        if model.model == SMALL and model.width % (2 * model.heads):
            raise InputError(f"[model] width must be a multiple of twice the heads ({model.heads}), got {model.width}")

    def load(self, settings: LanguageSettings, progress: bool = True) -> InstructionSplits:
        return corpus.load_instructions(settings)

    def describe(self, settings: LanguageSettings, data: InstructionSplits) -> str:
        note = f"; {data.num_dropped:,} without an answer dropped" if data.num_dropped else ""
        return f"{self.counts(settings, data, 'instructions')}{note}"

    def build(self, settings: LanguageSettings, data: InstructionSplits, device: torch.device) -> SequenceWorkload:
        chosen, max_tokens = settings.model, settings.data.max_tokens
        if chosen.model == SMALL:
            texts = (text for entry in data.train for text in (entry.prompt, entry.output))
            tokenizer = learned_tokenizer(texts, chosen.vocabulary_size)
            model = _small_llama(chosen, tokenizer, max_tokens)
        else:
            tokenizer, model = load_tokenizer(chosen.model, chosen.download), _load(chosen)
        if chosen.lora_rank is not None:
            peft = require("peft", "peft", "--lora-rank")
            rank = chosen.lora_rank
            model = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM"))
        network = _network(model, tokenizer, chosen)
        train, validation, test = (
            encoded_instructions(getattr(data, part), tokenizer, max_tokens, part)
            for part in ("train", "validation", "test")
        )
        check_rows(network, (train, validation, test), settings)
        unknown = unknown_words(tokenizer, (validation, test))
        notes = [*_cut(train, len(data.train), network), *([] if unknown is None else [unknown])]
        lr = _LR["small" if chosen.model == SMALL else "whole" if chosen.lora_rank is None else "lora"]
        choices, note = vocabulary_size(network.model), "\n".join(notes) or None
        return SequenceWorkload(settings, network, train, validation, data, choices=choices, lr=lr, note=note)

    def load_model(self, folder: RunFolder, settings: LanguageSettings, data: InstructionSplits) -> LoadedModel:
        network = _load_network(folder.model, settings.model)
        test = encoded_instructions(data.test, network.tokenizer, settings.data.max_tokens, "test")
        return LoadedModel(network, test, {"vocabulary": vocabulary_size(network.model)})

    def further(self, measured: dict[str, Any]) -> dict[str, Any]:
        return {"perplexity": perplexities(measured)}

    def comparable(self, run: EvaluatedRun) -> dict[str, Any]:
        # Losses of tokens of another vocabulary are not of one scale.
        return {"vocabulary": run.evaluation.vocabulary, **super().comparable(run)}

    def tables(self, runs: Sequence[EvaluatedRun]) -> list[Table]:
        return [perplexity_table(runs), accuracy_table(runs, "accuracy of tokens")]

    def summaries(self, runs: Sequence[EvaluatedRun]) -> list[Summary]:
        exits = [(number, depth) for number, depth in enumerate(depths_of(runs[0])[:-1]) if depth]
        return [
            *super().summaries(runs),
            *(
                Summary(f"agreement of exit {depth}", lambda run, number=number: run.evaluation.depth_agreement[number])
                for number, depth in exits
            ),
        ]

    def drawings(self) -> list[Drawing]:
        return [*super().drawings(), AGREEMENT]

    def choices(self, run: EvaluatedRun) -> int:
        return run.evaluation.vocabulary


def encoded_instructions(
    instructions: Sequence[Instruction], tokenizer: Any, max_length: int, part: str
) -> EncodedSamples:
    """Prompt, answer and end token as one row of at most `max_length` tokens; the prompt's labels are −100.

    What has no answer left is not there; of the whole `part` that is refused with an InputError.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError(f"{tokenizer.name_or_path}: the tokenizer has no end token to put behind an answer")
    rows, targets, counts = [], [], []
    for entry in instructions:
        prompt = tokenizer(entry.prompt)["input_ids"]
        if prompt and prompt[-1] == end:
            prompt = prompt[:-1]  # some tokenizers append it
        answer = [*tokenizer(entry.output, add_special_tokens=False)["input_ids"], end]
        ids = torch.tensor((prompt + answer)[:max_length], dtype=torch.int64)
        labels = ids.clone()
        labels[: len(prompt)] = IGNORED
        count = int((labels[1:] != IGNORED).sum())  # the first token of a sequence is not predicted
        if count:
            rows.append(torch.stack([ids, torch.ones_like(ids)]))
            targets.append(labels)
            counts.append(count)
    if not rows:
        raise InputError(
            f"[data] max_tokens is {max_length}: the prompts of all {len(instructions):,} {part} instructions are as "
            "long as that, so that all tokens are masked; raise --max-tokens"
        )
    return EncodedSamples(rows, targets, counts)


def _load_network(folder: Path, settings: LanguageModelSettings) -> PretrainedNetwork:
    """The network that a run kept, or InputError: a file of it is missing or not whole."""
    transformers = pretrained_library()
    if settings.lora_rank is None:
        with from_hub(str(folder), download=False) as where:
            model = load_complete(transformers.AutoModelForCausalLM, folder, **where)
    else:
        peft = require("peft", "peft", "--lora-rank")
        check_folder(folder)
        with from_hub(str(folder), download=False):
            model = peft.PeftModel.from_pretrained(_load(settings), folder)
    tokenizer = load_tokenizer(str(folder), download=False)  # of files that are known to be whole
    return _network(model, tokenizer, settings)


def _cut(train: EncodedSamples, given: int, network: PretrainedNetwork) -> Iterator[str]:
    """What a person should know about the training answers that --max-tokens cuts off or short."""
    end = network.tokenizer.all_special_ids
    short = sum(int(row[0, -1]) not in end for row in train.rows)
    if given > len(train):
        yield f"left out, as nothing of their answers is within --max-tokens: {given - len(train):,} of {given:,}"
    if short:
        yield f"answers cut short by --max-tokens: {short:,} of {given:,}"


def _small_llama(settings: LanguageModelSettings, tokenizer: Any, max_length: int) -> Any:
    transformers = pretrained_library()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.width,
        intermediate_size=settings.feedforward_width or 4 * settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=max_length,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return transformers.LlamaForCausalLM(config)


def _load(settings: LanguageModelSettings) -> Any:
    transformers = pretrained_library()
    with from_hub(settings.model, settings.download) as where:
        return load_complete(transformers.AutoModelForCausalLM, settings.model, dtype=torch.float32, **where)


def _network(model: Any, tokenizer: Any, settings: LanguageModelSettings) -> PretrainedNetwork:
    return PretrainedNetwork(model, tokenizer, settings.taps, inner_fraction=settings.inner_fraction)
