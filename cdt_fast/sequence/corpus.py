"""Texts and instructions as their settings name them: read, and divided into train, validation and test."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cdt_fast.checks import InputError
from cdt_fast.sequence.data.rows import FORMATS, HIDDEN, Row, hub_parts, hub_rows, read_rows, text_of
from cdt_fast.sequence.data.text import Splits, TextData, labeled_texts, read_imdb, read_table, split_text
from cdt_fast.sequence.settings import LanguageSettings, SequenceSettings, TextDataSettings, TextSettings

_PARTS = (
    ("train",),
    ("dev", "validation", "valid", "val", "validation_matched"),
    ("test",),
)  # names of the files of each part
_ORDER_SEED = 0
_SPLIT_SEED = 20_260_117  # one division for every run, so that runs with other seeds are measured on the same texts

_TASK = "Below is an instruction that describes a task"
_REQUEST = "Write a response that appropriately completes the request."

Parts = tuple[TextData | None, TextData | None, TextData | None]  # train, validation, test; None: no file holds it


class Instruction(NamedTuple):
    """What is asked, the input it is asked about ("" for none), and the answer."""

    instruction: str
    input: str
    output: str

    @property
    def prompt(self) -> str:
        """What stands before the answer, in the words of Stanford Alpaca."""
        if self.input:
            return (
                f"{_TASK}, paired with an input that provides further context. {_REQUEST}\n\n"
                f"### Instruction:\n{self.instruction}\n\n### Input:\n{self.input}\n\n### Response:\n"
            )
        return f"{_TASK}. {_REQUEST}\n\n### Instruction:\n{self.instruction}\n\n### Response:\n"


InstructionSplits = Splits[list[Instruction]]


def load_texts(settings: TextSettings) -> Splits[TextData]:
    """The texts of the settings, divided; parts that no file holds are taken from the training texts.

    Raises:
        InputError: the source cannot be read, lacks a column, or holds too little; a share leaves a part empty.
    """
    data, source = settings.data, _source(settings)
    parts = _parts_of_path(source, data) if isinstance(source, Path) else _parts_of_hub(source, data)
    num_dropped = sum(part.num_dropped for part in parts if part is not None)
    # Files are often sorted by class.
    train, validation, test = (part and part.shuffled(_ORDER_SEED) for part in parts)
    assert train is not None
    shares = [
        0.0 if part is not None else _share(name, share)
        for name, part, share in (("validation", validation, data.validation), ("test", test, data.test))
    ]
    taken = split_text(train, *shares, seed=_SPLIT_SEED)
    return Splits(taken.train, validation or taken.validation, test or taken.test, num_dropped)


def load_instructions(settings: LanguageSettings) -> InstructionSplits:
    """The instructions of the settings, divided.

    Raises:
        InputError: the source cannot be read, or holds too little.
    """
    data, source = settings.data, _source(settings)
    rows = read_rows(source) if isinstance(source, Path) else hub_rows(source, hub_parts(source)["train"])
    shares = _share("validation", data.validation), _share("test", data.test)
    instructions, num_dropped = instructions_of(source, rows)
    random.Random(_SPLIT_SEED).shuffle(instructions)
    counts = [max(1, round(share * len(instructions))) for share in shares]
    if sum(counts) >= len(instructions):
        raise InputError(
            f"{source}: has {len(instructions):,} with an answer; {counts[0]:,} for --validation and {counts[1]:,} for "
            "--test leave none to train on"
        )
    first, second = counts[0], sum(counts)
    return Splits(instructions[second:], instructions[:first], instructions[first:second], num_dropped)


def instructions_of(source: str | Path, rows: Iterable[Row]) -> tuple[list[Instruction], int]:
    """Instructions from rows with `instruction`, `output` and maybe `input`, and how many were dropped for want of an
    answer: the original file has some.

    Raises:
        InputError: the rows cannot be read, one is broken or asks nothing, or none has an answer.
    """
    instructions: list[Instruction] = []
    num_dropped = 0
    for place, row in rows:
        given = text_of((place, {"input": row.get("input") or ""}), "input")
        entry = Instruction(text_of((place, row), "instruction"), given, text_of((place, row), "output"))
        if not entry.instruction:
            raise InputError(f"{place}: 'instruction' is empty")
        if entry.output:
            instructions.append(entry)
        else:
            num_dropped += 1
    if not instructions:
        raise InputError(f"{source}: holds no instruction with an answer")
    return instructions, num_dropped


def digest(part: TextData | Sequence[Instruction]) -> str:
    """A fingerprint of texts with their classes, or of instructions with their answers, in their order."""
    content: Any = part
    if isinstance(part, TextData):
        content = [part.texts, part.text_pair, [part.names[label] for label in part.labels]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _source(settings: SequenceSettings) -> Path | str:
    """A path, or the name of a data set of the hub."""
    name: str = settings.data.source
    if Path(name).exists():
        return Path(name)
    if settings.model.download:
        return name
    raise InputError(f"{name}: no such file or folder; a data set of the hub, owner/name, is fetched with --download")


def _parts_of_path(source: Path, data: TextDataSettings) -> Parts:
    if source.is_file():
        return read_table(source, data), None, None
    if any((folder / "train" / "pos").is_dir() for folder in (source, source / "aclImdb")):
        return read_imdb(source), None, read_imdb(source, "test")
    mnli = source / "MNLI" if (source / "MNLI").is_dir() else source
    if (mnli / "dev_matched.tsv").is_file():
        unquoted = TextDataSettings(quoting=False)
        return read_table(mnli / "train.tsv", unquoted), None, read_table(mnli / "dev_matched.tsv", unquoted)
    files: list[Path | None] = []
    for names in _PARTS:
        there = [path for name in names for ending in FORMATS if (path := source / f"{name}.{ending}").is_file()]
        if len(there) > 1:
            raise InputError(f"{source}: holds both {there[0].name} and {there[1].name}; leave one of them there")
        files.append(there[0] if there else None)
    if files[0] is None:
        raise InputError(f"{source}: holds neither train.tsv (or .csv, .json, .jsonl) nor the folders of IMDb or MNLI")
    train = read_table(files[0], data)
    validation, test = (None if file is None else read_table(file, data, train.names) for file in files[1:])
    return train, validation, test


def _parts_of_hub(source: str, data: TextDataSettings) -> Parts:
    """The parts by their names. Where the classes of the test part are hidden, the validation part is the test."""
    parts = hub_parts(source)
    columns, label = (data.text_column, data.label_column, data.second_column), data.label_column or "label"

    def read(names: Sequence[str], classes: Sequence[str] | None) -> TextData | None:
        part = next((parts[name] for name in names if name in parts), None)
        if part is None or {row.get(label) for _, row in hub_rows(source, part)} == {HIDDEN}:
            return None
        return labeled_texts(source, hub_rows(source, part), columns, names=classes, unlabeled=HIDDEN)

    train = read(_PARTS[0], getattr(parts["train"].features.get(label), "names", None))
    if train is None:
        raise InputError(f"{source}: holds no labeled text")
    validation, test = (read(names, train.names) for names in _PARTS[1:])
    return (train, None, validation) if test is None else (train, validation, test)


def _share(name: str, share: float) -> float:
    """A share that has to be taken from the training data: without it the training would end in an error."""
    if not 0 < share < 1:
        raise InputError(f"--{name} must be a share above 0 and below 1, as no file holds that part, got {share:g}")
    return share
