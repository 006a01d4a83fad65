"""The task of answering instructions: a causal language model, whose every depth predicts the answer's tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cdt_fast.errors import InputError, require
from cdt_fast.models.layer_losses import predicted_overhead
from cdt_fast.sequence.corpus import InstructionSplits, digest
from cdt_fast.sequence.data.instructions import Instruction
from cdt_fast.sequence.networks import PretrainedNetwork, vocabulary_size
from cdt_fast.sequence.settings import LanguageModelSettings
from cdt_fast.sequence.task import IGNORED, EncodedSamples, SequenceTask
from cdt_fast.sequence.tokenizers import (
    TokenizerReader,
    from_hub,
    learned_tokenizer,
    load_tokenizer,
    pretrained_library,
)
from cdt_fast.training.config import RunConfig

SMALL = "llama-small"
_LR = {"small": 1e-3, "lora": 2e-4, "whole": 2e-5}

Encode = Callable[[Sequence[Instruction]], EncodedSamples]


def language_task(config: RunConfig, data: InstructionSplits) -> SequenceTask:
    """The task of the settings; see `tasks.build_task`."""
    settings: LanguageModelSettings = config.model
    _check(settings)
    reader = _load_reader(settings, data.train)
    model = _small_llama(settings, reader, config.data.max_tokens) if settings.model == SMALL else _load(settings)
    overhead = predicted_overhead(model, settings.taps, settings.inner_fraction)
    if settings.lora_rank is not None:
        model = _adapted(model, settings.lora_rank)
    network = _network(model, reader, settings)
    train, validation = (
        encoded_instructions(part, reader, config.data.max_tokens, purpose)
        for part, purpose in ((data.train, "to train on"), (data.validation, "to choose by"))
    )
    notes = [
        f"{settings.model}: reading {network.layers} inner depths takes {overhead:.2f} times the FLOP of a training "
        f"without them (--taps and --inner-fraction lower it)",
        *_cut(train, len(data.train), network),
        *_anchor_above_a_guess(config, network),
    ]
    return SequenceTask(
        config,
        network,
        train,
        validation,
        {name: digest(getattr(data, name)) for name in ("train", "validation", "test")},
        lr=_LR["small" if settings.model == SMALL else "whole" if settings.lora_rank is None else "lora"],
        samples="sequences",
        subject="instructions",
        note="\n".join(notes),
    )


def encoded_instructions(
    instructions: Sequence[Instruction], reader: TokenizerReader, longest: int, purpose: str
) -> EncodedSamples:
    """Prompt, answer and end token as one row; the prompt's labels are −100. What has no answer left is not there.

    Args:
        instructions: with their answers.
        reader: gives the tokens.
        longest: rows are cut to so many tokens.
        purpose: what the instructions are for, in the words of a message.

    Raises:
        InputError: no answer begins within `longest` tokens.
    """
    rows, targets, counts = [], [], []
    for entry in instructions:
        prompt, answer = _ids(reader, entry)
        ids = torch.tensor((prompt + answer)[:longest], dtype=torch.int64)
        labels = ids.clone()
        labels[: len(prompt)] = IGNORED
        count = int((labels[1:] != IGNORED).sum())  # the first token of a sequence is not predicted
        if count:
            rows.append(torch.stack([ids, torch.ones_like(ids)]))
            targets.append(labels)
            counts.append(count)
    if not rows:
        raise InputError(
            f"[data] max_tokens is {longest}: the prompts of all {len(instructions):,} instructions {purpose} are as "
            "long as that, so that all tokens are masked; raise --max-tokens"
        )
    return EncodedSamples(rows, targets, counts)


def load_language_network(folder: Path, config: RunConfig) -> tuple[Encode, PretrainedNetwork]:
    """What encodes instructions, and the network, from what a run kept.

    Raises:
        InputError: a file of them is missing or not whole.
    """
    settings: LanguageModelSettings = config.model
    reader = load_tokenizer(str(folder), download=False)
    transformers = pretrained_library()
    if settings.lora_rank is None:
        with from_hub(str(folder), download=False) as where:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **where)
    else:
        peft = require("peft", "peft", "--lora-rank")
        with from_hub(str(folder), download=False):
            model = peft.PeftModel.from_pretrained(_load(settings), folder)
    network = _network(model, reader, settings)

    def encode(instructions: Sequence[Instruction]) -> EncodedSamples:
        return encoded_instructions(instructions, reader, config.data.max_tokens, "to measure on")

    return encode, network


def _cut(train: EncodedSamples, given: int, network: PretrainedNetwork) -> Iterator[str]:
    """What a person should know about the training answers that --max-tokens cuts off or short."""
    end = network.special_ids
    short = sum(int(row[0, -1]) not in end for row in train.rows)
    if given > len(train):
        yield f"left out, as nothing of their answers is within --max-tokens: {given - len(train):,} of {given:,}"
    if short:
        yield f"answers cut short by --max-tokens: {short:,} of {given:,}"


def _anchor_above_a_guess(config: RunConfig, network: PretrainedNetwork) -> Iterator[str]:
    """A warning where the anchor asks less of layer 1 than a model that knows nothing gives."""
    settings, guess = config.constraints, math.log(vocabulary_size(network.model))
    anchored = settings.constrained and settings.reference_mode == "anchor"
    if anchored and isinstance(settings.reference, float | int) and settings.reference > guess + 0.5:
        yield (
            f"the anchor of {settings.reference:g} nats is above the loss of a guess among "
            f"{vocabulary_size(network.model):,} tokens, {guess:.2f}: it lets inner depths do worse than that; "
            f"--reference {guess:.1f} does not"
        )


def _check(settings: LanguageModelSettings) -> None:
    if not 0 < settings.inner_fraction <= 1:
        raise InputError(f"[model] inner_fraction must be in (0, 1], got {settings.inner_fraction}")
    if settings.lora_rank is not None:
        if settings.model == SMALL:
            raise InputError(f"[model] lora_rank needs a pretrained model to adapt; the weights of {SMALL} are random")
        require("peft", "peft", "--lora-rank")
    if settings.model == SMALL and settings.width % (2 * settings.heads):
        raise InputError(
            f"[model] width must be a multiple of twice the heads ({settings.heads}), got {settings.width}"
        )


def _load_reader(settings: LanguageModelSettings, train: Sequence[Instruction]) -> TokenizerReader:
    if settings.model != SMALL:
        return load_tokenizer(settings.model, settings.download)
    return learned_tokenizer(
        (text for entry in train for text in (entry.prompt, entry.output)), settings.vocabulary_size
    )


def _ids(reader: TokenizerReader, entry: Instruction) -> tuple[list[int], list[int]]:
    """The tokens of the prompt, with the tokenizer's start token, and those of the answer, with the end token."""
    tokenizer = reader.tokenizer
    if tokenizer.eos_token_id is None:
        raise InputError(f"{tokenizer.name_or_path}: the tokenizer has no end token to put behind an answer")
    prompt = tokenizer(entry.prompt)["input_ids"]
    if prompt and prompt[-1] == tokenizer.eos_token_id:
        prompt = prompt[:-1]  # some tokenizers append it
    return prompt, [*tokenizer(entry.output, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def _small_llama(settings: LanguageModelSettings, reader: TokenizerReader, longest: int) -> Any:
    transformers = pretrained_library()
    config = transformers.LlamaConfig(
        vocab_size=reader.size,
        hidden_size=settings.width,
        intermediate_size=settings.feedforward_width or 4 * settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=longest,
        pad_token_id=reader.padding_id,
        bos_token_id=None,
        eos_token_id=reader.tokenizer.eos_token_id,
    )
    return transformers.LlamaForCausalLM(config)


def _load(settings: LanguageModelSettings) -> Any:
    transformers = pretrained_library()
    with from_hub(settings.model, settings.download) as where:
        return transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32, **where)


def _adapted(model: Any, rank: int) -> Any:
    peft = require("peft", "peft", "--lora-rank")
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM"))


def _network(model: Any, reader: TokenizerReader, settings: LanguageModelSettings) -> PretrainedNetwork:
    return PretrainedNetwork(
        model, reader.save, reader.padding_id, reader.special_ids, settings.taps, settings.inner_fraction
    )
