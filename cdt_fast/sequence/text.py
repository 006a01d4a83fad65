"""The task of classifying texts: a `TextUT`, or an encoder of transformers that is fine-tuned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cdt_fast.checks import InputError
from cdt_fast.checksums import check_folder
from cdt_fast.models import TextUT
from cdt_fast.models.transformers_weights import load_complete
from cdt_fast.sequence import corpus
from cdt_fast.sequence.data.text import Splits, TextData
from cdt_fast.sequence.data.vocabulary import Vocabulary
from cdt_fast.sequence.evaluation import TextEvaluation
from cdt_fast.sequence.figures import accuracy_table
from cdt_fast.sequence.limits import check_rows, unknown_words
from cdt_fast.sequence.networks import Network, PretrainedNetwork, UnrolledNetwork
from cdt_fast.sequence.settings import UNROLLED, TextModelSettings, TextSettings
from cdt_fast.sequence.task import LoadedModel, SequenceTask, SequenceWorkload
from cdt_fast.sequence.tokenizers import (
    EncodedSamples,
    from_hub,
    load_saved_tokenizer,
    load_tokenizer,
    pretrained_library,
    rows_of,
)
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.task import EvaluatedRun, Table

_WIDTH = 128  # of learned embeddings
_LR = {True: 1e-3, False: 5e-5}  # new weights, and pretrained ones


class TextTask(SequenceTask):
    """See `training.task.Task`."""

    name, samples, subject, sample, accuracy = "text", "texts", "texts", "text", "Accuracy"
    evaluation = TextEvaluation

    def load(self, settings: TextSettings, progress: bool = True) -> Splits[TextData]:
        return corpus.load_texts(settings)

    def describe(self, settings: TextSettings, data: Splits[TextData]) -> str:
        kind = "texts" if data.train.text_pair is None else "pairs"
        note = f"; {data.num_dropped:,} rows without a class dropped" if data.num_dropped else ""
        return f"{self.counts(settings, data, kind)}; classes: {', '.join(data.train.names)}{note}"

    def build(self, settings: TextSettings, data: Splits[TextData], device: torch.device) -> SequenceWorkload:
        present = {data.train.names[label] for label in data.train.labels}
        if len(present) < 2:
            raise InputError(f"{settings.data.source}: all the training texts are of one class, {present.pop()!r}")
        max_tokens = settings.data.max_tokens
        network, names = _build(settings.model, max_tokens, data.train)
        parts = (part.with_names(names) for part in (data.train, data.validation, data.test))
        train, validation, test = (encoded_texts(part, network.tokenizer, max_tokens) for part in parts)
        check_rows(network, (train, validation, test), settings)
        lr, note = _LR[settings.model.model == UNROLLED], unknown_words(network.tokenizer, (validation, test))
        return SequenceWorkload(settings, network, train, validation, data, choices=len(names), lr=lr, note=note)

    def load_model(self, folder: RunFolder, settings: TextSettings, data: Splits[TextData]) -> LoadedModel:
        network, names = load_text_network(folder.model, settings, data.train.names)
        test = encoded_texts(data.test.with_names(names), network.tokenizer, settings.data.max_tokens)
        return LoadedModel(network, test, {"classes": names})

    def tables(self, runs: Sequence[EvaluatedRun]) -> list[Table]:
        return [accuracy_table(runs, "accuracy")]

    def choices(self, run: EvaluatedRun) -> int:
        return len(run.evaluation.classes)


def encoded_texts(data: TextData, tokenizer: Any, max_length: int) -> EncodedSamples:
    """Texts as rows of ids, each with its class."""
    rows = rows_of(tokenizer, data.texts, data.text_pair, max_length)
    return EncodedSamples(rows, list(torch.tensor(data.labels).unbind()), [1] * len(rows))


def load_text_network(folder: Path, settings: TextSettings, names: list[str]) -> tuple[Network, list[str]]:
    """The network and the classes in their order, from what a run kept, or InputError: a file of it is missing or not
    whole. `names` are those of the texts."""
    if settings.model.model == UNROLLED:
        check_folder(folder)
        model = TextUT.from_pretrained(folder)
        if model.classes != len(names):
            raise InputError(f"{folder}: has {model.classes} classes, and the training texts have {', '.join(names)}")
        return UnrolledNetwork(model, load_saved_tokenizer(folder)), names
    transformers = pretrained_library()
    with from_hub(str(folder), download=False) as where:
        encoder = load_complete(transformers.AutoModelForSequenceClassification, folder, **where)
    network = PretrainedNetwork(
        encoder, load_saved_tokenizer(folder), settings.model.taps, inner_pooling=settings.model.inner_pooling
    )
    return network, _own_classes(encoder.config) or names


def _build(settings: TextModelSettings, max_length: int, train: TextData) -> tuple[Network, list[str]]:
    """The untrained or pretrained network, and the classes in its order."""
    if settings.model == UNROLLED:
        return _build_unrolled(settings, max_length, train), train.names
    tokenizer = load_tokenizer(settings.model, settings.download)
    model, names = _load_encoder(settings, train.names)
    network = PretrainedNetwork(model, tokenizer, settings.taps, inner_pooling=settings.inner_pooling)
    if getattr(model.config, "pad_token_id", None) is None:  # a decoder looks for the last token before it
        model.config.pad_token_id = network.padding_id
    return network, names


def _load_encoder(settings: TextModelSettings, names: list[str]) -> tuple[Any, list[str]]:
    """The encoder with a head for the classes, and their order: that of its own head if that is for these classes."""
    transformers = pretrained_library()
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
    return model, names


def _own_classes(config: Any) -> list[str] | None:
    """The classes of a head in their order, where its makers named them."""
    named = getattr(config, "id2label", None) or {}
    classes = [str(named[number]) for number in sorted(named)]
    return None if not classes or classes[0].upper() == "LABEL_0" else classes


def _build_unrolled(settings: TextModelSettings, max_length: int, train: TextData) -> UnrolledNetwork:
    if settings.embedding is None:
        texts = [*train.texts, *(train.text_pair or [])]
        tokenizer = Vocabulary.build(texts, least=settings.least_count, size=settings.vocabulary_size)
        embedding: Any = (len(tokenizer), settings.width or _WIDTH)
    else:
        tokenizer = load_tokenizer(settings.embedding, settings.download)
        transformers = pretrained_library()
        with from_hub(settings.embedding, settings.download) as where:
            pretrained: Any = load_complete(
                transformers.AutoModel, settings.embedding, new_head=True, dtype=torch.float32, **where
            )
        embedding = pretrained.get_input_embeddings()
    model = TextUT(
        embedding,
        len(train.names),
        settings.layers,
        width=settings.width,
        attention_width=settings.attention_width,
        residual=settings.residual,
        tied=settings.tied,
        scale=settings.scale,
        positions=max_length if settings.positions else None,
        frozen_embedding=settings.frozen_embedding,
    )
    return UnrolledNetwork(model, tokenizer)
