"""The task of classifying texts: an unrolled transformer or a pretrained encoder, whose every depth names a class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cdt_fast.checks import InputError
from cdt_fast.models import TextUT
from cdt_fast.models.transformers_weights import load_complete
from cdt_fast.sequence.data import Splits, TextData, load_texts
from cdt_fast.sequence.evaluation import accuracy_table
from cdt_fast.sequence.networks import Network, PretrainedNetwork, UnrolledNetwork, unknown_words
from cdt_fast.sequence.settings import UNROLLED, TextModelSettings, TextSettings
from cdt_fast.sequence.task import SequenceTask, SequenceWorkload
from cdt_fast.sequence.tokenizers import (
    EncodedSamples,
    encoded_texts,
    from_hub,
    load_tokenizer,
    transformers_library,
    word_tokenizer,
)
from cdt_fast.training.task import EvaluatedRun, Table

_WIDTH = 128  # of learned embeddings
_LR = {True: 1e-3, False: 5e-5}  # new weights, and pretrained ones


class TextTask(SequenceTask):
    """See `training.task.Task`."""

    name, samples, subject, sample, accuracy = "text", "texts", "texts", "text", "Accuracy"
    dropped = "rows without a class"

    def load(self, settings: TextSettings, progress: bool = True) -> Splits[TextData]:
        return load_texts(settings)

    def describe(self, settings: TextSettings, data: Splits[TextData]) -> str:
        kind = "texts" if data.train.text_pair is None else "pairs"
        return self.described(settings, data, kind, f"; classes: {', '.join(data.train.names)}")

    def build(self, settings: TextSettings, data: Splits[TextData], device: torch.device) -> SequenceWorkload:
        model, max_tokens = settings.model, settings.data.max_tokens
        present = {data.train.names[label] for label in data.train.labels}
        if len(present) < 2:
            raise InputError(f"{settings.data.source}: all the training texts are of one class, {present.pop()!r}")
        if model.model == UNROLLED:
            network, names = _build_unrolled(model, data.train), data.train.names
        else:
            network, names = _build_encoder(model, data.train.names)
        parts = (part.with_names(names) for part in (data.train, data.validation, data.test))
        samples = [encoded_texts(part, network.tokenizer, max_tokens) for part in parts]
        own_words = model.model == UNROLLED and model.embedding is None
        remedy = "--least-count 1 takes the rare ones in" if own_words else "take another --model"
        note = unknown_words(network.tokenizer, samples[1:], remedy)
        lr = _LR[model.model == UNROLLED]
        return SequenceWorkload(settings, network, samples, data, choices=len(names), lr=lr, note=note)

    def kept(
        self, folder: Path, settings: TextSettings, data: Splits[TextData]
    ) -> tuple[Network, EncodedSamples, dict[str, Any]]:
        names = data.train.names
        if settings.model.model == UNROLLED:
            model = TextUT.from_pretrained(folder)
            if model.classes != len(names):
                raise InputError(f"{folder}: has {model.classes} classes; the training texts have {', '.join(names)}")
            network: Network = UnrolledNetwork(model, load_tokenizer(folder))
        else:
            with from_hub(folder) as where:
                encoder = load_complete(transformers_library().AutoModelForSequenceClassification, folder, **where)
            names = _own_classes(encoder.config) or names
            network = _encoder_network(encoder, load_tokenizer(folder), settings.model)
        test = encoded_texts(data.test.with_names(names), network.tokenizer, settings.data.max_tokens)
        return network, test, {"classes": names}

    def tables(self, runs: Sequence[EvaluatedRun]) -> list[Table]:
        return [accuracy_table(runs, "accuracy")]


def _build_encoder(settings: TextModelSettings, names: list[str]) -> tuple[PretrainedNetwork, list[str]]:
    """The encoder with a head for the classes, and their order: that of its own head if that is for these classes."""
    transformers, tokenizer = transformers_library(), load_tokenizer(settings.model, settings.download)
    with from_hub(settings.model, settings.download) as where:
        own = transformers.AutoConfig.from_pretrained(settings.model, **where)
        classes = _own_classes(own) or []
        if sorted(map(str.casefold, classes)) == sorted(map(str.casefold, names)):
            names = classes
        model = load_complete(
            transformers.AutoModelForSequenceClassification,
            settings.model,
            new_head=True,
            num_labels=len(names),
            id2label=dict(enumerate(names)),
            label2id={name: number for number, name in enumerate(names)},
            problem_type="single_label_classification",
            ignore_mismatched_sizes=own.num_labels != len(names),
            dtype=torch.float32,
            **where,
        )
    network = _encoder_network(model, tokenizer, settings)
    if getattr(model.config, "pad_token_id", None) is None:  # a decoder looks for the last token before it
        model.config.pad_token_id = network.padding_id
    return network, names


def _encoder_network(model: Any, tokenizer: Any, settings: TextModelSettings) -> PretrainedNetwork:
    return PretrainedNetwork(model, tokenizer, settings.taps, inner_pooling=settings.inner_pooling)


def _own_classes(config: Any) -> list[str] | None:
    """The classes of a head in their order, where its makers named them."""
    named = getattr(config, "id2label", None) or {}
    classes = [str(named[number]) for number in sorted(named)]
    return None if not classes or classes[0].upper() == "LABEL_0" else classes


def _build_unrolled(settings: TextModelSettings, train: TextData) -> UnrolledNetwork:
    if settings.embedding is None:
        texts = [*train.texts, *(train.text_pair or [])]
        tokenizer = word_tokenizer(texts, least=settings.least_count, size=settings.vocabulary_size)
        embedding: Any = (len(tokenizer), settings.width or _WIDTH)
    else:
        name, tokenizer = settings.embedding, load_tokenizer(settings.embedding, settings.download)
        with from_hub(name, settings.download) as where:
            kind = transformers_library().AutoModel
            model = load_complete(kind, name, new_head=True, dtype=torch.float32, **where)
        embedding = model.get_input_embeddings().weight
    names = ("width", "residual", "tied", "scale", "frozen_embedding")
    options = {name: getattr(settings, name) for name in names}
    return UnrolledNetwork(TextUT(embedding, len(train.names), settings.layers, **options), tokenizer)
