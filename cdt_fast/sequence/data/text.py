"""Labeled texts and pairs of texts: IMDb, MNLI, and any file with named columns; shuffled and split by seed."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cdt_fast.checks import check_fraction
from cdt_fast.errors import InputError
from cdt_fast.files import shown
from cdt_fast.listing import entries
from cdt_fast.sequence.data.rows import Row, column, read_rows

NLI_LABELS = ("entailment", "neutral", "contradiction")

_BREAKS = re.compile(r"\s*(?:<br\s*/?>\s*)+", re.IGNORECASE)


@dataclass(frozen=True)
class TextData:
    """Texts with their classes.

    Attributes:
        texts: the texts, or the first ones of pairs.
        labels: the class of each, an index into `names`.
        names: the classes.
        text_pair: the second texts of pairs, or None.
        num_dropped: how many rows of the source have no label and are not here.
    """

    texts: list[str]
    labels: list[int]
    names: list[str]
    text_pair: list[str] | None = None
    num_dropped: int = field(default=0, compare=False)

    def __len__(self) -> int:
        return len(self.texts)

    def subset(self, indices: Sequence[int]) -> TextData:
        """The texts with these numbers, in this order."""
        return replace(
            self,
            texts=[self.texts[index] for index in indices],
            labels=[self.labels[index] for index in indices],
            text_pair=None if self.text_pair is None else [self.text_pair[index] for index in indices],
        )

    def shuffled(self, seed: int) -> TextData:
        """The same texts in an order drawn by `seed`."""
        order = list(range(len(self)))
        random.Random(seed).shuffle(order)
        return self.subset(order)

    def with_names(self, names: Sequence[str]) -> TextData:
        """The same texts, their classes numbered in the order of `names`: that of a checkpoint, for example.

        Names are compared without regard to case. `names` may hold further classes.

        Raises:
            InputError: a class is not among `names`, or two of them are the same.
        """
        numbers = _numbers(names)
        missing = [name for name in self.names if _folded(name) not in numbers]
        if missing:
            raise InputError(f"names must hold the class {missing[0]!r}, got {', '.join(map(repr, names))}")
        renumbered = [numbers[_folded(name)] for name in self.names]
        return replace(self, names=list(names), labels=[renumbered[label] for label in self.labels])


@dataclass(frozen=True)
class TextSplits:
    """Texts to train on, to choose the kept model by (validation), and to evaluate on (test)."""

    train: TextData
    validation: TextData
    test: TextData


def read_table(
    path: str | os.PathLike[str],
    text: str | int = "text",
    label: str | int = "label",
    second: str | int | None = None,
    *,
    names: Sequence[str] | None = None,
    unlabeled: Collection[str] = (),
    format: str | None = None,
    quoting: bool = True,
    header: bool = True,
    seed: int | None = 0,
) -> TextData:
    """Texts and classes from the columns of a TSV, CSV, JSON or JSONL file.

    `<br />` becomes a space, and blanks around a text are taken off.

    Args:
        path: the file, in UTF-8.
        text, label, second: the columns of the text, of its class, and of the second text of pairs: names, or without
            a header numbers from 0.
        names: the classes in the order of their numbers, as they stand in the file but for their case; None: those of
            the file, in order (of numbers where all are numbers, else of the alphabet).
        unlabeled: values of `label` that mean that a row has no class; such rows are left out.
        format, quoting, header: as in `data.rows.read_rows`: the suffix says the format, double quotes enclose fields,
            and the first line names the columns.
        seed: of the order, for files are often sorted by class; None: as in the file.

    Raises:
        InputError: the file cannot be read or a row is broken; a column is missing (the message lists those there), a
            text is empty or no text, or a label is not among `names`.
    """
    rows = read_rows(Path(path), format, quoting=quoting, header=header)
    return labeled_texts(path, rows, text, label, second, names=names, unlabeled=unlabeled, seed=seed)


def labeled_texts(
    source: str | os.PathLike[str],
    rows: Iterable[Row],
    text: str | int = "text",
    label: str | int = "label",
    second: str | int | None = None,
    *,
    names: Sequence[str] | None = None,
    unlabeled: Collection[str] = (),
    seed: int | None = 0,
) -> TextData:
    """Texts and classes from rows; `source` is what messages call them by, the rest as for `read_table`."""
    path = Path(source)
    texts: list[str] = []
    text_pair: list[str] = []
    values: list[str] = []
    places: list[str] = []
    num_dropped = 0
    for where, row in rows:
        if not values and not num_dropped:
            _check_columns(path, where, row, {"label": label, "text": text, "second": second})
        value = _label(path, where, column(path, where, row, label))
        if value in unlabeled:
            num_dropped += 1
            continue
        texts.append(_text(path, where, row, text))
        if second is not None:
            text_pair.append(_text(path, where, row, second))
        values.append(value)
        places.append(where)
    if not texts:
        raise InputError(f"{path}: holds no labeled text")
    names = _in_order(values) if names is None else names
    numbers = _numbers(names)
    labels = []
    for where, value in zip(places, values, strict=True):
        if _folded(value) not in numbers:
            raise InputError(f"{path}, {where}: label {shown(value)} is not among {', '.join(map(repr, names))}")
        labels.append(numbers[_folded(value)])
    data = TextData(texts, labels, list(names), None if second is None else text_pair, num_dropped)
    return data if seed is None else data.shuffled(seed)


def read_imdb(folder: str | os.PathLike[str], split: str = "train", *, seed: int | None = 0) -> TextData:
    """IMDb's reviews, `aclImdb/{train,test}/{neg,pos}/*.txt`; the classes are "neg", "pos".

    Args:
        folder: `aclImdb`, or the folder that holds it.
        split: "train" or "test".
        seed: of the order; None: by class, as the files lie.

    Raises:
        InputError: a folder is missing or holds no reviews, or a review is empty or not UTF-8.
    """
    root = Path(folder)
    root = root / "aclImdb" if (root / "aclImdb").is_dir() else root
    texts: list[str] = []
    labels: list[int] = []
    names = ["neg", "pos"]
    for number, name in enumerate(names):
        place = root / split / name
        files = [path for path in entries(place) if path.suffix == ".txt"]
        if not files:
            raise InputError(f"{place}: holds no reviews (*.txt)")
        for path in files:
            try:
                content = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{path}: cannot be read as UTF-8 text ({error})") from error
            texts.append(_cleaned(content))
            if not texts[-1]:
                raise InputError(f"{path}: is empty")
            labels.append(number)
    data = TextData(texts, labels, names)
    return data if seed is None else data.shuffled(seed)


def read_mnli(
    path: str | os.PathLike[str],
    split: str = "train",
    *,
    names: Sequence[str] = NLI_LABELS,
    seed: int | None = 0,
) -> TextData:
    """MNLI of GLUE, `MNLI/{train,dev_matched,dev_mismatched}.tsv`: quotes are characters, the gold label is last.

    Args:
        path: the folder `MNLI`, the folder that holds it, or one of the files.
        split: which file of a folder.
        names: the order of the classes; that of the hub's data set. Checkpoints differ: see their `id2label`.
        seed: of the order; None: as in the file.

    Raises:
        InputError: as `read_table`; the labels of GLUE's test files are hidden.
    """
    path = Path(path)
    if path.is_dir():
        path = (path / "MNLI" if (path / "MNLI").is_dir() else path) / f"{split}.tsv"
    return read_table(
        path,
        "sentence1",
        "gold_label",
        "sentence2",
        names=names,
        unlabeled=("-",),  # where the annotators did not agree
        format="tsv",
        quoting=False,
        seed=seed,
    )


def split_text(data: TextData, validation: float = 0.1, test: float = 0.1, *, seed: int = 0) -> TextSplits:
    """Divide texts so that every part has the classes in the same proportions, in an order drawn by `seed`.

    Args:
        data: the texts.
        validation, test: fractions in [0, 1), together below 1; of a class at least one text each, unless 0.
        seed: of the draw.

    Raises:
        InputError: the fractions leave no training texts, or a class has too few texts.
    """
    fractions = [check_fraction("validation", validation), check_fraction("test", test)]
    if sum(fractions) >= 1:
        raise InputError(f"validation and test must leave a share for training, got {validation} and {test}")
    generator = random.Random(seed)
    parts: list[list[int]] = [[], [], []]
    for number, name in enumerate(data.names):
        members = [index for index, label in enumerate(data.labels) if label == number]
        generator.shuffle(members)
        counts = [max(1, round(fraction * len(members))) if fraction and members else 0 for fraction in fractions]
        if members and sum(counts) >= len(members):
            needed = 1 + sum(1 for fraction in fractions if fraction)
            raise InputError(f"class {name!r} has {len(members)} text(s), too few for {needed} parts of these sizes")
        first, second = counts[0], sum(counts)
        for part, chosen in zip(parts, (members[second:], members[:first], members[first:second]), strict=True):
            part.extend(chosen)
    for part in parts:
        generator.shuffle(part)
    return TextSplits(*(data.subset(part) for part in parts))


def _check_columns(path: Path, where: str, row: Any, wanted: dict[str, str | int | None]) -> None:
    """Of the first row: whoever did not name the columns learns here how to."""
    missing = {argument: name for argument, name in wanted.items() if name is not None and name not in row}
    if missing:
        options = " and ".join(f"{argument}= (--{argument}-column)" for argument in missing)
        raise InputError(
            f"{path}, {where}: no column {' and no '.join(map(repr, missing.values()))}; there are "
            f"{', '.join(map(repr, row)) or 'none'}; say which it is by {options}"
        )


def _cleaned(text: str) -> str:
    return _BREAKS.sub(" ", text).strip()


def _text(path: Path, where: str, row: Any, name: str | int) -> str:
    value = column(path, where, row, name)
    if not isinstance(value, str):
        raise InputError(f"{path}, {where}: {name!r} must be a text, got {shown(value)}")
    text = _cleaned(value)
    if not text:
        raise InputError(f"{path}, {where}: {name!r} is empty")
    return text


def _label(path: Path, where: str, value: Any) -> str:
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, int):  # bool too
        return str(value).lower()
    raise InputError(f"{path}, {where}: the label must be a word or a whole number, got {shown(value)}")


def _folded(name: str) -> str:
    return name.strip().casefold()


def _in_order(values: Collection[str]) -> list[str]:
    """The different values; those that differ in nothing but their case are the same class."""
    names = list({_folded(value): value for value in sorted(values, reverse=True)}.values())
    # More digits than these are a name, and more than Python turns into a number.
    if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names):
        return sorted(names, key=int)
    return sorted(names, key=_folded)


def _numbers(names: Sequence[str]) -> dict[str, int]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InputError(f"names must be a list of class names, got {names!r}")
    numbers = {_folded(name): number for number, name in enumerate(names)}
    if len(numbers) < len(names) or not names:
        raise InputError(f"names must be different classes, at least one, got {', '.join(map(repr, names))}")
    return numbers
