"""The task of classifying texts: a `TextUT`, or an encoder of transformers that is fine-tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cdt_fast.errors import InputError
from cdt_fast.models import TextUT, load_pretrained
from cdt_fast.sequence.corpus import digest
from cdt_fast.sequence.data.text import TextData, TextSplits
from cdt_fast.sequence.data.vocabulary import Vocabulary
from cdt_fast.sequence.networks import Network, PretrainedNetwork, UnrolledNetwork
from cdt_fast.sequence.settings import TextModelSettings
from cdt_fast.sequence.task import EncodedSamples, SequenceTask
from cdt_fast.sequence.tokenizers import Reader, WordReader, from_hub, load_reader, load_tokenizer, pretrained_library
from cdt_fast.training.config import RunConfig

UNROLLED = "text-ut"
_WIDTH = 128  # of learned embeddings
_LR = {True: 1e-3, False: 5e-5}  # new weights, and pretrained ones


def text_task(config: RunConfig, data: TextSplits) -> SequenceTask:
    """The task of the settings; see `tasks.build_task`."""
    present = {data.train.names[label] for label in data.train.labels}
    if len(present) < 2:
        raise InputError(f"{config.data.source}: all the training texts are of one class, {present.pop()!r}")
    reader, network, names = _build(config.model, config.data.max_tokens, data.train)
    train, validation = (
        encoded_texts(part.with_names(names), reader, config.data.max_tokens) for part in (data.train, data.validation)
    )
    identity = {name: digest(getattr(data, name)) for name in ("train", "validation", "test")}
    return SequenceTask(
        config,
        network,
        train,
        validation,
        identity,
        lr=_LR[config.model.model == UNROLLED],
        samples="texts",
        subject="texts",
    )


def encoded_texts(data: TextData, reader: Reader, longest: int) -> EncodedSamples:
    """Texts as rows of ids, each with its class."""
    rows = reader.encode(data.texts, data.text_pair, longest)
    return EncodedSamples(rows, list(torch.tensor(data.labels).unbind()), [1] * len(rows))


def load_text_network(folder: Path, config: RunConfig, names: list[str]) -> tuple[Reader, Network, list[str]]:
    """The reader, the network and the classes in their order, from what a run kept; `names` are those of the texts.

    Raises:
        InputError: a file of them is missing or not whole.
    """
    reader = load_reader(folder)
    if config.model.model == UNROLLED:
        model = load_pretrained(folder)
        if not isinstance(model, TextUT):
            raise InputError(f"{folder}: holds a {type(model).__name__}, expected a TextUT")
        return reader, UnrolledNetwork(model, reader), names
    transformers = pretrained_library()
    with from_hub(str(folder), download=False) as where:
        encoder = transformers.AutoModelForSequenceClassification.from_pretrained(folder, **where)
    return reader, _encoder_network(encoder, reader, config.model), _own_classes(encoder.config) or names


def _build(settings: TextModelSettings, longest: int, train: TextData) -> tuple[Reader, Network, list[str]]:
    """The reader, the untrained or pretrained network, and the classes in its order."""
    if settings.model == UNROLLED:
        return *_build_unrolled(settings, longest, train), train.names
    reader = load_tokenizer(settings.model, settings.download)
    model, names = _load_encoder(settings, train.names)
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and longest > positions:
        raise InputError(f"[data] max_tokens is {longest}, but {settings.model} has {positions} positions")
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = reader.padding_id
    return reader, _encoder_network(model, reader, settings), names


def _encoder_network(model: Any, reader: Any, settings: TextModelSettings) -> PretrainedNetwork:
    return PretrainedNetwork(model, reader.save, reader.padding_id, reader.special_ids, settings.taps)


def _load_encoder(settings: TextModelSettings, names: list[str]) -> tuple[Any, list[str]]:
    """The encoder with a head for the classes, and their order: that of its own head if that is for these classes."""
    transformers = pretrained_library()
    with from_hub(settings.model, settings.download) as where:
        own = transformers.AutoConfig.from_pretrained(settings.model, **where)
        classes = _own_classes(own) or []
        if {name.casefold() for name in classes} == {name.casefold() for name in names}:
            names = classes
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            settings.model,
            num_labels=len(names),
            id2label=dict(enumerate(names)),
            label2id={name: number for number, name in enumerate(names)},
            problem_type="single_label_classification",
            ignore_mismatched_sizes=own.num_labels != len(names),
            dtype=torch.float32,
            **where,
        )
    return model, names


def _own_classes(config: Any) -> list[str] | None:
    """The classes of a head in their order, where its makers named them."""
    named = getattr(config, "id2label", None) or {}
    classes = [str(named[number]) for number in sorted(named)]
    return None if not classes or classes[0].upper() == "LABEL_0" else classes


def _build_unrolled(settings: TextModelSettings, longest: int, train: TextData) -> tuple[Reader, UnrolledNetwork]:
    reader: Reader
    if settings.embedding is None:
        vocabulary = Vocabulary.build(
            [*train.texts, *(train.text_pair or [])], least=settings.least_count, size=settings.vocabulary_size
        )
        reader = WordReader(vocabulary)
        embedding: Any = (len(vocabulary), _WIDTH if settings.width is None else settings.width)
    else:
        reader = load_tokenizer(settings.embedding, settings.download)
        embedding = _load_embedding(settings)
    model = TextUT(
        embedding,
        len(train.names),
        settings.layers,
        width=settings.width,
        attention_width=settings.attention_width,
        residual=settings.residual,
        tied=settings.tied,
        scale=settings.scale,
        positions=longest if settings.positions else None,
        frozen_embedding=settings.frozen_embedding,
    )
    return reader, UnrolledNetwork(model, reader)


def _load_embedding(settings: TextModelSettings) -> Any:
    transformers = pretrained_library()
    assert settings.embedding is not None
    with from_hub(settings.embedding, settings.download) as where:
        model = transformers.AutoModel.from_pretrained(settings.embedding, dtype=torch.float32, **where)
    return model.get_input_embeddings()
