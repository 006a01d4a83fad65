"""The task of classifying texts: an unrolled transformer or a pretrained encoder, whose every depth names a class."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from cdt_fast.checks import InputError
from cdt_fast.models import TextUT
from cdt_fast.sequence.data import Splits, TextData, digest, load_texts
from cdt_fast.sequence.evaluation import SequenceEvaluation, accuracy_table, measure
from cdt_fast.sequence.networks import Network, PretrainedNetwork, UnrolledNetwork, check_rows, unknown_words
from cdt_fast.sequence.settings import UNROLLED, TextModelSettings, TextSettings
from cdt_fast.sequence.task import SequenceWorkload, check, described, reported
from cdt_fast.sequence.tokenizers import encoded_texts, from_hub, load_model, load_tokenizer, word_tokenizer
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.task import EvaluatedRun, Report

_WIDTH = 128  # of learned embeddings
_CLASSIFIER = "AutoModelForSequenceClassification"

Evaluation = SequenceEvaluation
SAMPLES = "texts"
BF16_ON_CPU, FIXED_SHAPES = True, False


def load(settings: TextSettings, progress: bool = True) -> Splits:
    check(settings)
    return load_texts(settings.data)


def build(settings: TextSettings, data: Splits, device: torch.device) -> SequenceWorkload:
    model, names = settings.model, data.train.names
    if len(set(data.train.labels)) < 2:
        only = names[data.train.labels[0]]
        raise InputError(f"{settings.data.source}: all the training texts are of one class, {only!r}")
    description = f"{described(settings, data, SAMPLES, 'rows without a class')}; classes: {', '.join(names)}"
    unrolled = model.model == UNROLLED
    if unrolled:
        network: Network = _build_unrolled(model, data.train)
    else:
        network, names = _build_encoder(model, names)
    samples = [_encoded(part, names, network.tokenizer, settings) for part in data[:3]]
    own_words = unrolled and model.embedding is None
    remedy = "--least-count 1 takes the rare ones in" if own_words else "take another --model"
    note = unknown_words(network.tokenizer, samples[1:], remedy)
    description += "" if note is None else f"\n{note}"
    description += f"\n{seen:,} test texts are among the training texts too" if (seen := data.num_seen) else ""
    lr, guess_loss = 1e-3 if unrolled else 5e-5, _guess_loss(data.train, data.train)
    return SequenceWorkload(settings, network, samples, description, guess_loss=guess_loss, lr=lr)


def evaluate(folder: RunFolder, settings: TextSettings, data: Splits) -> dict[str, Any]:
    names, tokenizer = data.train.names, load_tokenizer(folder.model)
    if settings.model.model == UNROLLED:
        model = TextUT.from_pretrained(folder.model)
        if model.classes != len(names):
            raise InputError(f"{folder.model}: has {model.classes} classes; the training texts have {', '.join(names)}")
        network: Network = UnrolledNetwork(model, tokenizer)
    else:
        encoder = load_model(_CLASSIFIER, folder.model)
        names = _own_classes(encoder.config) or names
        network = _pretrained(encoder, tokenizer, settings.model)
    test = _encoded(data.test, names, tokenizer, settings)
    check_rows(network, (test,), settings)
    measured = measure(network, test, settings, BF16_ON_CPU)
    own = {"classes": names, "guess_loss": _guess_loss(data.train, data.test)}
    return {**measured, **own, "test_digest": digest(data.test), "seen_texts": data.num_seen}


def report(runs: Sequence[EvaluatedRun]) -> Report:
    return reported(runs, [accuracy_table(runs, "accuracy")])


def _encoded(part: TextData, names: Sequence[str], tokenizer: Any, settings: TextSettings) -> Any:
    """Return the part as `EncodedSamples`; the runs of an experiment share them: of 50,000 texts they take a minute."""
    model, longest = settings.model, settings.data.max_tokens
    key = (model.model, model.embedding, longest, *names, frozenset(tokenizer.get_vocab().items()))
    if key not in part.encoded:
        part.encoded[key] = encoded_texts(part.with_names(names), tokenizer, longest)
    return part.encoded[key]


def _guess_loss(train: TextData, part: TextData) -> float:
    """Return the loss where the answer to every text is the shares of the classes in training, with one text of each
    class more, as some may have none."""
    counts = Counter([*train.labels, *range(len(train.names))])
    return sum(math.log(counts.total() / counts[label]) for label in part.labels) / len(part)


def _build_encoder(settings: TextModelSettings, names: list[str]) -> tuple[PretrainedNetwork, list[str]]:
    """Return the encoder with a head for the classes, and their order: that of its own head if it is for them."""
    name, download = settings.model, settings.download
    tokenizer = load_tokenizer(name, download)
    with from_hub(name, download) as (transformers, where):
        own = transformers.AutoConfig.from_pretrained(name, **where)
    classes = _own_classes(own) or []
    if sorted(map(str.casefold, classes)) == sorted(map(str.casefold, names)):
        names = classes
    head = {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": "single_label_classification",
        "ignore_mismatched_sizes": own.num_labels != len(names),
    }
    model = load_model(_CLASSIFIER, name, download, new_head=True, **head)
    return _pretrained(model, tokenizer, settings), names


def _pretrained(model: Any, tokenizer: Any, settings: TextModelSettings) -> PretrainedNetwork:
    """Return the network of a classifier, which takes the tokenizer's padding for its own."""
    network = PretrainedNetwork(model, tokenizer, inner_pooling=settings.inner_pooling)
    # RoBERTa and its kin count positions from their own, and would from another once the model is loaded again.
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    if all(table is model.get_input_embeddings() or table.padding_idx is None for table in tables):
        for config in (model.config, model.config.get_text_config()):  # a decoder reads the last token that is another
            config.pad_token_id = network.padding_id
    return network


def _own_classes(config: Any) -> list[str] | None:
    """Return the classes of a head in their order, where its makers named them."""
    named = getattr(config, "id2label", None) or {}
    classes = [str(named[number]) for number in sorted(named)]
    return None if not classes or classes[0].upper() == "LABEL_0" else classes


def _build_unrolled(settings: TextModelSettings, train: TextData) -> UnrolledNetwork:
    name, download = settings.embedding, settings.download
    if name is None:
        tokenizer = word_tokenizer([*train.texts, *(train.text_pair or [])], settings.least_count)
        if len(tokenizer) == len(tokenizer.all_special_ids):
            raise InputError(f"[model] least_count is {settings.least_count}, and no word is as frequent")
        embedding: Any = (len(tokenizer), settings.width or _WIDTH)
    else:
        tokenizer = load_tokenizer(name, download)
        embedding = load_model("AutoModel", name, download, new_head=True).get_input_embeddings().weight
    return UnrolledNetwork(TextUT(embedding, len(train.names), settings.layers, width=settings.width), tokenizer)
