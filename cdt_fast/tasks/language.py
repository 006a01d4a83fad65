"""The task of answering instructions: a causal language model, whose every depth predicts the answer's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cdt_fast.data.instructions import Instruction
from cdt_fast.errors import InputError, require
from cdt_fast.models.layer_losses import predicted_overhead
from cdt_fast.runs.config import RunConfig
from cdt_fast.runs.sections_text import LanguageModelSettings
from cdt_fast.tasks.corpus import InstructionSplits, digest
from cdt_fast.tasks.networks import PretrainedNetwork
from cdt_fast.tasks.readers import ByteReader, TokenizerReader, from_hub, load_tokenizer, pretrained_library
from cdt_fast.tasks.sequences import IGNORED, EncodedSamples, SequenceTask

SMALL = "llama-small"
_LR = {"small": 1e-3, "lora": 2e-4, "whole": 2e-5}

Encode = Callable[[Sequence[Instruction]], EncodedSamples]


def language_task(config: RunConfig, data: InstructionSplits, process: int) -> SequenceTask:
    """The task of the settings; see `tasks.build_task`."""
    settings: LanguageModelSettings = config.model
    _check(settings)
    reader = _load_reader(settings)
    model = _small_llama(settings, reader, config.data.max_tokens) if settings.model == SMALL else _load(settings)
    overhead = predicted_overhead(model, settings.taps, settings.inner_fraction)
    if settings.lora_rank is not None:
        model = _adapted(model, settings.lora_rank)
    network = _network(model, reader, settings)
    train, validation = (
        encoded_instructions(part, reader, config.data.max_tokens) for part in (data.train, data.validation)
    )
    left_out = len(data.train) - len(train)
    notes = [
        f"{settings.model}: reading {network.layers} inner depths takes {overhead:.2f} times the FLOP of a training "
        f"without them (--taps and --inner-fraction lower it)"
    ]
    if left_out:
        notes.append(f"{left_out:,} instructions are left out: nothing of their answers is within --max-tokens")
    return SequenceTask(
        config,
        network,
        train,
        validation,
        {name: digest(getattr(data, name)) for name in ("train", "validation", "test")},
        lr=_LR["small" if settings.model == SMALL else "whole" if settings.lora_rank is None else "lora"],
        samples="sequences",
        subject="instructions",
        process=process,
        note="\n".join(notes),
    )


def encoded_instructions(
    instructions: Sequence[Instruction], reader: ByteReader | TokenizerReader, longest: int
) -> EncodedSamples:
    """Prompt, answer and end token as one row; the prompt's labels are −100. What has no answer left is not there.

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
            f"[data] max_tokens is {longest}: every prompt is as long as that, so that all tokens are masked and there "
            "is nothing to learn; raise --max-tokens"
        )
    return EncodedSamples(rows, targets, counts)


def load_language_network(folder: Path, config: RunConfig) -> tuple[Encode, PretrainedNetwork]:
    """What encodes instructions, and the network, from what a run kept.

    Raises:
        InputError: a file of them is missing or not whole.
    """
    settings: LanguageModelSettings = config.model
    reader = ByteReader() if settings.model == SMALL else load_tokenizer(str(folder), download=False)
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
        return encoded_instructions(instructions, reader, config.data.max_tokens)

    return encode, network


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


def _load_reader(settings: LanguageModelSettings) -> ByteReader | TokenizerReader:
    return ByteReader() if settings.model == SMALL else load_tokenizer(settings.model, settings.download)


def _ids(reader: ByteReader | TokenizerReader, entry: Instruction) -> tuple[list[int], list[int]]:
    """The tokens of the prompt, with the tokenizer's start token, and those of the answer, with the end token."""
    if isinstance(reader, ByteReader):
        return reader.ids(entry.prompt), [*reader.ids(entry.output), reader.end_id]
    tokenizer = reader.tokenizer
    if tokenizer.eos_token_id is None:
        raise InputError(f"{tokenizer.name_or_path}: the tokenizer has no end token to put behind an answer")
    prompt = tokenizer(entry.prompt)["input_ids"]
    if prompt and prompt[-1] == tokenizer.eos_token_id:
        prompt = prompt[:-1]  # some tokenizers append it
    return prompt, [*tokenizer(entry.output, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def _small_llama(settings: LanguageModelSettings, reader: Any, longest: int) -> Any:
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
        eos_token_id=reader.end_id,
    )
    return transformers.LlamaForCausalLM(config)


def _load(settings: LanguageModelSettings) -> Any:
    transformers = pretrained_library()
    with from_hub(settings.model, settings.download) as where:
        return transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32, **where)


def _adapted(model: Any, rank: int) -> Any:
    peft = require("peft", "peft", "--lora-rank")
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM"))


def _network(model: Any, reader: ByteReader | TokenizerReader, settings: LanguageModelSettings) -> PretrainedNetwork:
    def save_reader(folder: Path) -> None:
        if isinstance(reader, TokenizerReader):
            reader.save(folder)

    return PretrainedNetwork(
        model, save_reader, reader.padding_id, reader.special_ids, settings.taps, settings.inner_fraction
    )
