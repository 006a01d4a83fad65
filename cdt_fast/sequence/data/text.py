"""Labeled texts and pairs of texts: IMDb, MNLI, and any file with named columns; split by seed."""

from __future__ import annotations

import os
import random
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from cdt_fast.checks import InputError
from cdt_fast.files import shown
from cdt_fast.listing import entries
from cdt_fast.sequence.data.rows import HIDDEN, Row, read_rows, text_of
from cdt_fast.sequence.settings import TextDataSettings

T = TypeVar("T")

NLI_LABELS = ("entailment", "neutral", "contradiction")

_NLI_COLUMNS = ("sentence1", "gold_label", "sentence2")
_BREAKS = re.compile(r"\s*(?:<br\s*/?>\s*)+", re.IGNORECASE)
_ADVICE = "; `cdt-fast train text` takes others by --text-column, --label-column and --second-column"


@dataclass(frozen=True)
class TextData:
    """Texts with their classes."""

    texts: list[str]  # of pairs the first ones
    labels: list[int]  # the class of each, an index into `names`
    names: list[str]
    text_pair: list[str] | None = None  # the second texts of pairs
    num_dropped: int = field(default=0, compare=False)  # rows of the source that have no label and are not here

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

        A name that is not among `names` as it is written is the one that differs from it in case alone. `names` may
        hold further classes.

        Raises:
            InputError: a class is not among `names`, or in case alone differs from two of them.
        """
        exact = {_composed(name): number for number, name in enumerate(names)}
        renumbered = []
        for name in map(_composed, self.names):
            alike = [name] if name in exact else [other for other in exact if other.casefold() == name.casefold()]
            if len(alike) != 1:
                known = ", ".join(map(repr, names))
                raise InputError(f"the label {shown(name)} is not among those of the training or the model: {known}")
            renumbered.append(exact[alike[0]])
        return replace(self, names=list(names), labels=[renumbered[label] for label in self.labels])


@dataclass(frozen=True)
class Splits(Generic[T]):
    """What to train on, to choose the kept model by (validation) and to evaluate on (test), and how many rows of the
    source were dropped, as there is no class or no answer in them."""

    train: T
    validation: T
    test: T
    num_dropped: int = 0


def read_table(
    path: str | os.PathLike[str], settings: TextDataSettings | None = None, names: Sequence[str] | None = None
) -> TextData:
    """Texts and classes from the columns of a TSV, CSV, JSON or JSONL file.

    Args:
        path: the file, in UTF-8.
        settings: its format and its columns. Without, the columns are those of MNLI where a TSV file has them, whose
            rows without a class are left out, else "text" and "label"; and double quotes enclose fields, but in MNLI.
        names: the classes in the order of their numbers; None: those of the file, see `labeled_texts`.

    Raises:
        InputError: as `read_rows` and `labeled_texts`.
    """
    path, settings = Path(path), settings or TextDataSettings()
    columns = settings.text_column, settings.label_column, settings.second_column
    head: set[str] = set()
    if settings.header and (settings.format or path.suffix) in ("tsv", ".tsv") and path.is_file():
        with path.open("rb") as file:
            head.update(file.readline().decode(errors="replace").strip().split("\t"))
    quoting = settings.quoting
    if quoting is None:  # others with MNLI's columns do quote
        quoting = not head.issuperset((*_NLI_COLUMNS, "pairID"))
    rows = read_rows(path, settings.format, quoting=quoting, header=settings.header)
    if not any(columns) and head.issuperset(_NLI_COLUMNS):
        # "-" where the annotators did not agree
        return labeled_texts(path, rows, _NLI_COLUMNS, names=names or NLI_LABELS, unlabeled=HIDDEN)
    return labeled_texts(path, rows, columns, names=names)


def labeled_texts(
    source: str | os.PathLike[str],
    rows: Iterable[Row],
    columns: tuple[str | None, str | None, str | None],
    *,
    names: Sequence[str] | None = None,
    unlabeled: str | None = None,
) -> TextData:
    """Texts and classes from rows. `<br />` becomes a space, and blanks around a text are taken off.

    Args:
        source: what messages call the rows.
        rows: as `read_rows` gives them.
        columns: those of the text ("text"), of its class ("label"), and of the second text of pairs (none).
        names: the classes in the order of their numbers; None: those of the rows, in order of numbers or the alphabet,
            where names that differ in case are different classes, but for true and false.
        unlabeled: what stands there where a row has no class; such rows are left out.

    Raises:
        InputError: a column is missing, a text is empty or no text, or a label is not among `names`.
    """
    label, second = columns[1] or "label", columns[2]
    texts: dict[str, list[str]] = {column: [] for column in (columns[0] or "text", second) if column}
    values: list[str] = []
    num_dropped = 0
    for row in rows:
        value = _composed(text_of(row, label, _ADVICE))
        if value == unlabeled:
            num_dropped += 1
            continue
        values.append(value)
        for column, part in texts.items():
            part.append(_BREAKS.sub(" ", text_of(row, column, _ADVICE)).strip())
            if not value or not part[-1]:
                raise InputError(f"{row[0]}: {column if value else label!r} is empty")
    if not values:
        raise InputError(f"{source}: holds no labeled text")
    own = _in_order(values)
    first, *pair = texts.values()
    numbers = {_class_of(name): number for number, name in enumerate(own)}
    labels = [numbers[_class_of(value)] for value in values]
    data = TextData(first, labels, own, *pair, num_dropped=num_dropped)
    return data if names is None else data.with_names(names)


def read_imdb(folder: str | os.PathLike[str], split: str = "train") -> TextData:
    """IMDb's reviews, `{train,test}/{neg,pos}/*.txt` of `folder` or of `aclImdb` in it; the classes are "neg", "pos".

    Raises:
        InputError: a folder is missing or holds no reviews, or a review is empty or not UTF-8.
    """
    root = Path(folder)
    root = root / "aclImdb" if (root / "aclImdb").is_dir() else root
    rows: list[Row] = []
    for name in ("neg", "pos"):
        for path in entries(root / split / name):
            if path.suffix == ".txt":
                try:
                    rows.append((str(path), {"text": path.read_text(encoding="utf-8"), "label": name}))
                except (OSError, UnicodeDecodeError) as error:
                    raise InputError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    return labeled_texts(root / split, rows, (None, None, None))


def split_text(data: TextData, validation: float = 0.1, test: float = 0.1, *, seed: int = 0) -> Splits[TextData]:
    """Divide texts so that every part has the classes in the same proportions, in an order drawn by `seed`.

    Of a class `validation` and `test` have at least one text each, unless their fractions are 0.

    Raises:
        InputError: the fractions leave no training texts, or a class has too few texts.
    """
    fractions = validation, test
    if sum(fractions) >= 1:
        raise InputError(f"validation and test must leave a share for training, got {validation} and {test}")
    generator = random.Random(seed)
    parts: list[list[int]] = [[], [], []]
    for number, name in enumerate(data.names):
        members = [index for index, label in enumerate(data.labels) if label == number]
        generator.shuffle(members)
        counts = [max(1, round(fraction * len(members))) if fraction and members else 0 for fraction in fractions]
        if members and sum(counts) >= len(members):
            raise InputError(
                f"class {name!r} has {len(members)} text(s), and needs {sum(counts) + 1}: --validation {validation:g} "
                f"takes {counts[0]}, --test {test:g} takes {counts[1]}, and one is to train on"
            )
        first, second = counts[0], sum(counts)
        for part, chosen in zip(parts, (members[second:], members[:first], members[first:second]), strict=True):
            part.extend(chosen)
    for part in parts:
        generator.shuffle(part)
    train, held_out, tested = map(data.subset, parts)
    return Splits(train, held_out, tested)


def _composed(name: str) -> str:
    """The name in Unicode's form NFC: an é of two characters looks like that of one."""
    return unicodedata.normalize("NFC", name)


def _class_of(value: str) -> str:
    """What values of one class share: how tools write true and false differs."""
    return value.casefold() if value.casefold() in ("true", "false") else value


def _in_order(values: Collection[str]) -> list[str]:
    """The different classes."""
    names = list({_class_of(value): value for value in sorted(values, reverse=True)}.values())
    # More digits than these are a name, and more than Python turns into a number.
    if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names):
        return sorted(names, key=int)
    return sorted(names, key=lambda name: (name.casefold(), name))
