"""Texts and instructions as their settings name them: read, and divided into train, validation and test."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdt_fast.errors import InputError
from cdt_fast.sequence.data.hub import HIDDEN, hub_rows, is_hub_name, load_hub
from cdt_fast.sequence.data.instructions import Instruction, instructions_of
from cdt_fast.sequence.data.rows import FORMATS, Row, read_rows
from cdt_fast.sequence.data.text import (
    NLI_LABELS,
    TextData,
    TextSplits,
    labeled_texts,
    read_imdb,
    read_mnli,
    read_table,
    split_text,
)
from cdt_fast.sequence.settings import LanguageDataSettings, LanguageSettings, TextDataSettings, TextSettings

_PARTS = (
    ("train",),
    ("dev", "validation", "valid", "val", "validation_matched"),
    ("test",),
)  # names of the files of each part
_NLI_COLUMNS = ("sentence1", "sentence2", "gold_label")
_SPLIT_SEED = 20_260_117  # one division for every run, so that runs with other seeds are measured on the same texts


@dataclass(frozen=True)
class InstructionSplits:
    """Instructions to train on, to choose the kept model by and to evaluate on, and how many were dropped."""

    train: list[Instruction]
    validation: list[Instruction]
    test: list[Instruction]
    num_dropped: int = 0


def load_texts(settings: TextSettings) -> TextSplits:
    """The texts of the settings, divided.

    Raises:
        InputError: the source cannot be read, lacks a column, or holds too little; a share leaves a part empty.
    """
    source = _source(settings.data.source)
    if isinstance(source, Path):
        return _texts(source, settings.data)
    return _hub_texts(source, load_hub(source, settings.model.download), settings.data)


def load_instructions(settings: LanguageSettings) -> InstructionSplits:
    """The instructions of the settings, divided.

    Raises:
        InputError: the source cannot be read, or holds too little.
    """
    source = _source(settings.data.source)
    if isinstance(source, Path):
        return _instructions(source, read_rows(source), settings.data)
    parts = load_hub(source, settings.model.download)
    if "train" not in parts:
        raise InputError(f"{source}: has no part 'train'; there are {', '.join(parts)}")
    return _instructions(source, hub_rows(parts["train"]), settings.data)


def _source(name: str | None) -> Path | str:
    """A path, or the name of a data set of the hub."""
    assert name is not None  # or the settings would have been refused
    if Path(name).exists():
        return Path(name)
    if is_hub_name(name):
        return name
    raise InputError(f"{name}: no such file or folder")


def describe(data: TextSplits | InstructionSplits, source: str) -> str:
    """How much there is, in a line."""
    counts = f"{len(data.train):,} train, {len(data.validation):,} validation, {len(data.test):,} test"
    if isinstance(data, InstructionSplits):
        note = f"; {data.num_dropped:,} without an answer dropped" if data.num_dropped else ""
        return f"{source}: instructions: {counts}{note}"
    num_dropped = sum(part.num_dropped for part in (data.train, data.validation, data.test))
    note = f"; {num_dropped:,} rows without a class dropped" if num_dropped else ""
    kind = "texts" if data.train.text_pair is None else "pairs"
    return f"{source}: {kind}: {counts}; classes: {', '.join(data.train.names)}{note}"


def digest(part: TextData | Sequence[Instruction]) -> str:
    """A fingerprint of texts with their classes, or of instructions with their answers, in their order."""
    if isinstance(part, TextData):
        content: Any = [part.texts, part.text_pair, [part.names[label] for label in part.labels]]
    else:
        content = [[entry.instruction, entry.input, entry.output] for entry in part]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _texts(source: Path, data: TextDataSettings) -> TextSplits:
    if source.is_file():
        return _completed(_table(source, data, None), None, None, data)
    if any((folder / "train" / "pos").is_dir() for folder in (source, source / "aclImdb")):
        train, test = read_imdb(source), read_imdb(source, "test")
        return _completed(train, None, test, data)
    mnli = source / "MNLI" if (source / "MNLI").is_dir() else source
    if (mnli / "dev_matched.tsv").is_file():
        return _completed(read_mnli(mnli), None, read_mnli(mnli, "dev_matched"), data)
    train_file, validation_file, test_file = (_file_of(source, names) for names in _PARTS)
    if train_file is None:
        raise InputError(f"{source}: holds neither train.tsv (or .csv, .json, .jsonl) nor the folders of IMDb or MNLI")
    train = _table(train_file, data, None)
    validation, test = (
        None if file is None else _table(file, data, train.names) for file in (validation_file, test_file)
    )
    return _completed(train, validation, test, data)


def _hub_texts(source: str, parts: dict[str, Any], data: TextDataSettings) -> TextSplits:
    """The parts by their names. Where the classes of the test part are hidden, the validation part is the test."""
    columns = [data.text_column or "text", data.label_column or "label", data.second_column]
    by_names = [next((parts[name] for name in names if name in parts), None) for names in _PARTS]
    train, *others = by_names
    if train is None:
        raise InputError(f"{source}: has no part 'train'; there are {', '.join(parts)}")
    classes = getattr(train.features.get(columns[1]), "names", None)

    def read(part: Any, names: Sequence[str] | None) -> TextData:
        return labeled_texts(source, hub_rows(part), *columns, names=names, unlabeled=(HIDDEN,))

    texts = read(train, classes)
    hidden = [part is None or {row.get(columns[1]) for _, row in hub_rows(part)} == {HIDDEN} for part in others]
    validation, test = (
        None if missing else read(part, texts.names) for part, missing in zip(others, hidden, strict=True)
    )
    return _completed(texts, None, validation, data) if test is None else _completed(texts, validation, test, data)


def _file_of(folder: Path, names: Sequence[str]) -> Path | None:
    files = [path for name in names for ending in FORMATS if (path := folder / f"{name}.{ending}").is_file()]
    if len(files) > 1:
        raise InputError(f"{folder}: holds both {files[0].name} and {files[1].name}; leave one of them there")
    return files[0] if files else None


def _completed(
    train: TextData, validation: TextData | None, test: TextData | None, data: TextDataSettings
) -> TextSplits:
    """The parts that are not there are taken from the training texts."""
    shares = [
        0.0 if part is not None else _share(name, share)
        for name, part, share in (("validation", validation, data.validation), ("test", test, data.test))
    ]
    taken = split_text(train, *shares, seed=_SPLIT_SEED)
    return TextSplits(taken.train, validation or taken.validation, test or taken.test)


def _share(name: str, share: float) -> float:
    """A share that has to be taken from the training data: without it the training would end in an error."""
    if not 0 < share < 1:
        raise InputError(f"--{name} must be a share above 0 and below 1, as no file holds that part, got {share:g}")
    return share


def _table(path: Path, data: TextDataSettings, names: Sequence[str] | None) -> TextData:
    """A file with the columns that the settings name, or those of MNLI where they are there."""
    named = (data.text_column, data.second_column, data.label_column)
    columns = _first_line(path, data)
    # GLUE's own files of MNLI do not quote; others with its columns do.
    quoting = data.quoting if data.quoting is not None else not columns.issuperset((*_NLI_COLUMNS, "pairID"))
    if not any(named) and columns.issuperset(_NLI_COLUMNS):
        text, second, label = _NLI_COLUMNS
        return read_table(
            path, text, label, second, names=names or NLI_LABELS, unlabeled=("-",), format=data.format, quoting=quoting
        )
    text, second, label = (_column(name, data.header) for name in named)
    return read_table(
        path,
        "text" if text is None else text,
        "label" if label is None else label,
        second,
        names=names,
        format=data.format,
        quoting=quoting,
        header=data.header,
    )


def _first_line(path: Path, data: TextDataSettings) -> set[str]:
    """The fields of the first line of a TSV file with a header; of any other none, as MNLI comes in no other form."""
    if not data.header or (data.format or path.suffix.removeprefix(".")) != "tsv":
        return set()
    with path.open("rb") as file:
        return set(file.readline().decode(errors="replace").strip().split("\t"))


def _column(name: str | None, header: bool) -> str | int | None:
    if name is None or header:
        return name
    try:
        return int(name)
    except ValueError:
        raise InputError(f"without a header columns are numbers from 0, got {name!r}") from None


def _instructions(source: Path | str, rows: Iterable[Row], data: LanguageDataSettings) -> InstructionSplits:
    shares = _share("validation", data.validation), _share("test", data.test)
    instructions, num_dropped = instructions_of(source, rows, seed=_SPLIT_SEED)
    counts = [max(1, round(share * len(instructions))) for share in shares]
    if sum(counts) >= len(instructions):
        raise InputError(
            f"{source}: has {len(instructions):,} with an answer; {counts[0]:,} for --validation and {counts[1]:,} for "
            "--test leave none to train on"
        )
    first, second = counts[0], sum(counts)
    return InstructionSplits(instructions[second:], instructions[:first], instructions[first:second], num_dropped)
