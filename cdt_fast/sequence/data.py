"""Labeled texts and instructions as their settings name them: read, and divided into train, validation and test."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from cdt_fast.checks import InputError
from cdt_fast.files import parsed_json, shown
from cdt_fast.listing import entries
from cdt_fast.sequence.settings import LanguageSettings, TextDataSettings, TextSettings

T = TypeVar("T")
Row = tuple[str, Mapping[Any, Any]]  # "reviews.csv, row 3", and its values by column

FORMATS = ("tsv", "csv", "json", "jsonl")
HIDDEN = "-"  # the class of rows whose annotators disagree
NLI_LABELS = ("entailment", "neutral", "contradiction")
_NLI_COLUMNS = ("sentence1", "gold_label", "sentence2")
_PARTS = (("train",), ("dev", "validation", "valid", "val"), ("test",))  # names of each part
_ORDER_SEED = 0
_SPLIT_SEED = 20_260_117  # one division for every run, so that runs with other seeds are measured on the same texts
_BREAKS = re.compile(r"\s*(?:<br\s*/?>\s*)+", re.IGNORECASE)
_QUOTES = "do double quotes enclose fields there? --quoting, --no-quoting"
_ADVICE = "; `cdt-fast train text` takes others by --text-column, --label-column and --second-column"
_TASK = "Below is an instruction that describes a task"
_REQUEST = "Write a response that appropriately completes the request."


@dataclass(frozen=True)
class Splits(Generic[T]):
    """Samples to train on, to choose the kept model by (validation) and to evaluate on (test), and how many rows of the
    source have no class or no answer and were dropped."""

    train: T
    validation: T
    test: T
    num_dropped: int = 0


@dataclass(frozen=True)
class TextData:
    """Texts with their classes."""

    texts: list[str]  # of pairs the first ones
    labels: list[int]  # the class of each, an index into `names`
    names: list[str]
    text_pair: list[str] | None = None  # the second texts of pairs
    num_dropped: int = field(default=0, compare=False)

    def __len__(self) -> int:
        return len(self.texts)

    def subset(self, indices: Sequence[int]) -> TextData:
        """The texts with these numbers, in this order."""
        columns = (self.texts, self.labels, self.text_pair)
        texts, labels, pair = (column and [column[index] for index in indices] for column in columns)
        return replace(self, texts=texts, labels=labels, text_pair=pair)

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


class Instruction(NamedTuple):
    """An instruction, the input it is about ("" for none), and the answer."""

    instruction: str
    input: str
    output: str

    @property
    def prompt(self) -> str:
        """The text before the answer, in the words of Stanford Alpaca."""
        if self.input:
            return (
                f"{_TASK}, paired with an input that provides further context. {_REQUEST}\n\n"
                f"### Instruction:\n{self.instruction}\n\n### Input:\n{self.input}\n\n### Response:\n"
            )
        return f"{_TASK}. {_REQUEST}\n\n### Instruction:\n{self.instruction}\n\n### Response:\n"


def load_texts(settings: TextSettings) -> Splits[TextData]:
    """The texts of the settings, divided; parts that no file holds are taken from the training texts.

    Raises:
        InputError: the source cannot be read, lacks a column, or holds too little; a share leaves a part empty.
    """
    data = settings.data
    parts = _parts_of(Path(str(data.source)), data)
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


def load_instructions(settings: LanguageSettings) -> Splits[list[Instruction]]:
    """The instructions of the settings, divided; those without an answer, of which the original file has some, dropped.

    Raises:
        InputError: the source cannot be read, asks nothing in some row, or holds too little.
    """
    data, source = settings.data, Path(str(settings.data.source))
    shares = _share("validation", data.validation), _share("test", data.test)
    every = []
    for place, row in read_rows(source):
        columns = ("instruction", row), ("input", {"input": row.get("input") or ""}), ("output", row)
        every.append(Instruction(*(text_of((place, values), name) for name, values in columns)))
        if not every[-1].instruction:
            raise InputError(f"{place}: 'instruction' is empty")
    instructions = [entry for entry in every if entry.output]
    if not instructions:
        raise InputError(f"{source}: holds no instruction with an answer")
    random.Random(_SPLIT_SEED).shuffle(instructions)
    first, more = (max(1, round(share * len(instructions))) for share in shares)
    second = first + more
    if second >= len(instructions):
        raise InputError(
            f"{source}: has {len(instructions):,} with an answer; {first:,} for --validation and {more:,} for --test "
            "leave none to train on"
        )
    dropped = len(every) - len(instructions)
    return Splits(instructions[second:], instructions[:first], instructions[first:second], dropped)


def digest(part: TextData | Sequence[Instruction]) -> str:
    """A fingerprint of texts with their classes, or of instructions with their answers, in their order."""
    content: Any = part
    if isinstance(part, TextData):
        content = [part.texts, part.text_pair, [part.names[label] for label in part.labels]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def read_rows(path: Path, *, quoting: bool = True, header: bool = True) -> Iterator[Row]:
    """The rows of a TSV, CSV, JSON (a list of objects) or JSONL file in UTF-8 one by one.

    Args:
        path: the file, with or without a byte order mark; its suffix says the format.
        quoting: TSV and CSV: fields may be in double quotes, which then may hold separators and line breaks. Without,
            a quote is a character like others, and a line is a row.
        header: TSV and CSV: the first line names the columns; without, columns are "0", "1" and so on.

    Raises:
        InputError: the file cannot be read or holds no rows, its format is unknown, or a row of it is broken.
    """
    form = path.suffix.lower().removeprefix(".").replace("ndjson", "jsonl")
    if form not in FORMATS:
        raise InputError(f"{path}: is of an unknown format; give a file whose suffix is one of {', '.join(FORMATS)}")
    place = None
    try:
        # Without quotes only line feeds end a line: texts hold other characters that Python too takes for line ends.
        with path.open(encoding="utf-8-sig", newline="" if quoting else "\n") as file:
            if form == "json":
                rows = _numbered("entry", parsed_json(file.read(), str(path), list[Any]))
            elif form == "jsonl":
                lines = _numbered("line", file)
                rows = ((at, parsed_json(line, f"{path}, {at}")) for at, line in lines if line.strip())
            else:
                rows = _from_table(file, "\t" if form == "tsv" else ",", quoting, header)
            for place, row in rows:
                if not isinstance(row, dict):
                    raise InputError(f"{path}, {place}: must be an object, got a {type(row).__name__}")
                yield f"{path}, {place}", row
    except csv.Error as error:
        raise InputError(f"{path}, after {place or 'the start'}: {error}; {_QUOTES}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    if place is None:
        raise InputError(f"{path}: holds no rows")


def text_of(row: Row, column: str, advice: str = "") -> str:
    """The text in a column, or the number there in digits, without blanks around it.

    Raises:
        InputError: there is no such column (the message lists those there are, and ends with `advice`), or no text.
    """
    place, values = row
    if column not in values:
        raise InputError(f"{place}: no column {column!r}; there are {', '.join(map(repr, values)) or 'none'}{advice}")
    value = values[column]
    if isinstance(value, int):  # bool too
        return str(value).lower()
    if not isinstance(value, str):
        raise InputError(f"{place}: {column!r} must be a text, got {shown(value)}")
    return value.strip()


def read_table(
    path: str | os.PathLike[str], settings: TextDataSettings | None = None, names: Sequence[str] | None = None
) -> TextData:
    """Texts and classes from the columns of a file, as `read_rows` and `labeled_texts` read them.

    Unless the settings name columns, those of MNLI are taken from a TSV file that has them, and its rows without a
    class left out; and unless they say so, double quotes enclose fields in every file but MNLI's.
    """
    path, settings = Path(path), settings or TextDataSettings()
    columns = settings.text_column, settings.label_column, settings.second_column
    head: set[str] = set()
    if settings.header and path.suffix == ".tsv" and path.is_file():
        with path.open("rb") as file:
            head.update(file.readline().decode(errors="replace").strip().split("\t"))
    quoting = settings.quoting
    if quoting is None:  # others with MNLI's columns do quote
        quoting = not head.issuperset((*_NLI_COLUMNS, "pairID"))
    rows = read_rows(path, quoting=quoting, header=settings.header)
    if not any(columns) and head.issuperset(_NLI_COLUMNS):
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
        source: the name of the rows in messages.
        rows: as `read_rows` gives them.
        columns: those of the text ("text"), of its class ("label"), and of the second text of pairs (none).
        names: the classes in the order of their numbers; None: those of the rows, in order of numbers or the alphabet,
            where names that differ in case are different classes, but for true and false.
        unlabeled: the label of rows without a class, which are left out.

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
    numbers = {_class_of(name): number for number, name in enumerate(own)}
    first, *pair = texts.values()
    data = TextData(first, [numbers[_class_of(value)] for value in values], own, *pair, num_dropped=num_dropped)
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
    return Splits(*map(data.subset, parts))


def _parts_of(source: Path, data: TextDataSettings) -> Sequence[TextData | None]:
    """The training, validation and test texts of a file or a folder; None: no file holds them."""
    if not source.exists():
        raise InputError(f"{source}: no such file or folder")
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
    return train, *(None if file is None else read_table(file, data, train.names) for file in files[1:])


def _share(name: str, share: float) -> float:
    """A share that has to be taken from the training data: without it the training would end in an error."""
    if not 0 < share < 1:
        raise InputError(f"--{name} must be a share above 0 and below 1, as no file holds that part, got {share:g}")
    return share


def _numbered(word: str, values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{word} {number}", value) for number, value in enumerate(values, 1))


def _from_table(lines: Iterable[str], separator: str, quoting: bool, header: bool) -> Iterator[tuple[str, Any]]:
    if quoting:
        csv.field_size_limit(2**31 - 1)  # 131072 characters by default; there are longer texts
        # Strict: a quote that is a mere character ends in an error and not in rows that swallow the next ones.
        rows: Iterable[list[str]] = csv.reader(lines, delimiter=separator, strict=True)
    else:
        rows = (line.rstrip("\r\n").split(separator) for line in lines)
    names: list[str] | None = None
    for place, fields in _numbered("row", rows):
        if fields in ([], [""]):
            continue
        if names is None:
            names = [name.strip() for name in fields] if header else list(map(str, range(len(fields))))
            if len(set(names)) < len(names):
                raise csv.Error(f"two columns have the same name: {', '.join(names)}")
            if header:
                continue
        if len(fields) != len(names):
            raise csv.Error(f"{len(fields)} fields, expected {len(names)}")
        yield place, dict(zip(names, fields, strict=True))


def _composed(name: str) -> str:
    """The name in Unicode's form NFC: an é of two characters looks like that of one."""
    return unicodedata.normalize("NFC", name)


def _class_of(value: str) -> str:
    """The same for values of one class: tools write true and false in several ways."""
    return value.casefold() if value.casefold() in ("true", "false") else value


def _in_order(values: Collection[str]) -> list[str]:
    """The different classes."""
    names = list({_class_of(value): value for value in sorted(values, reverse=True)}.values())
    # More digits than these are a name, and more than Python turns into a number.
    if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names):
        return sorted(names, key=int)
    return sorted(names, key=lambda name: (name.casefold(), name))
