"""Labeled texts and instructions, read from files and divided into train, validation and test."""

import csv
import functools
import hashlib
import io
import json
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from cdt_fast.checks import InputError
from cdt_fast.files import parsed_json, shown
from cdt_fast.listing import entries
from cdt_fast.sequence.settings import LanguageSettings, TextDataSettings

Row = tuple[str, Mapping[str, Any]]  # "reviews.csv, row 3", and its values by column
# Unicode's form NFC: an é of two characters looks like that of one.
_composed = functools.partial(unicodedata.normalize, "NFC")

NLI_LABELS = ("entailment", "neutral", "contradiction")
_NLI_COLUMNS = ("sentence1", "gold_label", "sentence2")
_HIDDEN = "-"  # the class of MNLI's rows whose annotators disagree
_SUFFIXES = (".tsv", ".csv", ".json", ".jsonl")
_PARTS = (("train",), ("dev", "validation", "valid", "val"), ("test", "dev_matched"))  # names of each part
_ORDER_SEED = 0
_SPLIT_SEED = 20_260_117  # one division for every run, so that runs with other seeds are measured on the same texts
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_TASK = "Below is an instruction that describes a task"
_REQUEST = "Write a response that appropriately completes the request."


class Splits(NamedTuple):
    """Samples to train on, to choose the kept model by (validation) and to evaluate on (test)."""

    train: Any
    validation: Any
    test: Any
    num_dropped: int = 0  # rows without a class or an answer

    @property
    def identity(self) -> dict[str, str]:
        """Return by what a run knows its data again."""
        return dict(zip(self._fields, map(digest, self[:3]), strict=False))

    @property
    def num_seen(self) -> int:
        """Return how many test texts are among those for training too, as in files that were divided before."""
        seen = {kind for part in (self.train, self.validation) for kind in part.kinds}
        return sum(kind in seen for kind in self.test.kinds)

    @property
    def sizes(self) -> dict[str, int]:
        """Return how many samples there are."""
        return {"training texts": len(self.train) + len(self.validation), "test texts": len(self.test)}

    def limited(self, limit: int | None) -> Self:
        """Return the same with the first test samples alone, which are in no order."""
        return self if limit is None else self._replace(test=self.test[:limit])


@dataclass(frozen=True)
class TextData:
    """Texts with their classes."""

    texts: list[str]  # of pairs the first ones
    labels: list[int]  # the class of each, an index into `names`
    names: list[str]
    text_pair: list[str] | None = None  # the second texts of pairs
    num_dropped: int = field(default=0, compare=False)
    encoded: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)  # by the settings

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """Return what copies of a text, or of a pair, have in common."""
        return [*zip(self.texts, self.text_pair or self.texts, strict=True)]

    def __getitem__(self, some: slice) -> Self:
        return self.subset(range(len(self))[some])

    def subset(self, indices: Sequence[int]) -> Self:
        """Return the texts with these numbers, in this order."""
        columns = (self.texts, self.labels, self.text_pair)
        texts, labels, pair = (column and [column[index] for index in indices] for column in columns)
        return replace(self, texts=texts, labels=labels, text_pair=pair)

    def with_names(self, names: Sequence[str], source: Path | None = None) -> Self:
        """Return the same texts, of the file `source`, with classes numbered in the order of `names`, such as a
        checkpoint's; a class that is not among them as it is written is the one that differs in case alone."""
        exact = {_composed(name): number for number, name in enumerate(names)}
        renumbered = []
        for name in map(_composed, self.names):
            alike = [name] if name in exact else [other for other in exact if other.casefold() == name.casefold()]
            if len(alike) != 1:
                known = ", ".join(map(repr, names))
                where = "" if source is None else f"{source}: "
                wrong = f"the label {shown(name)} is not among those of the training or the model: {known}"
                raise InputError(where + wrong)
            renumbered.append(exact[alike[0]])
        return replace(self, names=list(names), labels=[renumbered[label] for label in self.labels])


class Instruction(NamedTuple):
    """An instruction, the input it is about (blank for none), and the answer, with their blanks."""

    instruction: str
    input: str
    output: str

    @property
    def prompt(self) -> str:
        """Return the text before the answer, in the words of Stanford Alpaca."""
        has_input = bool(self.input.strip())
        context = ", paired with an input that provides further context" if has_input else ""
        about = f"### Input:\n{self.input}\n\n" if has_input else ""
        return f"{_TASK}{context}. {_REQUEST}\n\n### Instruction:\n{self.instruction}\n\n{about}### Response:\n"


def load_texts(data: TextDataSettings) -> Splits:
    """Read the texts that the settings name; parts that no file holds are taken from the training texts."""
    train, *held_out = _parts_of(Path(str(data.source)), data)
    num_dropped = sum(part.num_dropped for part in (train, *held_out) if part is not None)
    # Files are often sorted by class.
    train, *held_out = (part and part.subset(_shuffled(range(len(part)), _ORDER_SEED)) for part in (train, *held_out))
    shares = {"validation": data.validation, "test": data.test}
    missing = [0.0 if part else _share(*share) for part, share in zip(held_out, shares.items(), strict=True)]
    taken = split_text(train, *missing, seed=_SPLIT_SEED)
    return Splits(taken.train, held_out[0] or taken.validation, held_out[1] or taken.test, num_dropped)


def load_instructions(settings: LanguageSettings) -> Splits:
    """Read the instructions of the settings, without those that have no answer."""
    data, source = settings.data, Path(str(settings.data.source))
    shares = _share("validation", data.validation), _share("test", data.test)
    every = []
    for place, row in read_rows(source):
        context = "" if row.get("input") is None else _text((place, row), "input")
        every.append(Instruction(_text((place, row), "instruction"), context, _text((place, row), "output")))
        if not every[-1].instruction.strip():
            raise InputError(f"{place}: 'instruction' is empty")
    instructions = [entry for entry in every if entry.output.strip()]
    if not instructions:
        raise InputError(f"{source}: holds no instruction with an answer")
    kinds = [(entry.instruction.strip(), entry.input.strip()) for entry in instructions]
    first, more = (max(1, round(share * len(set(kinds)))) for share in shares)
    order = _shuffled(range(len(kinds)), _SPLIT_SEED)
    parts = _divided(order, kinds, (first, more), max(shares) * len(kinds), {})
    if not all(parts):
        held_out = f"{first:,} for --validation and {more:,} for --test leave none to train on"
        held_out += f", as they are of {len(set(kinds)):,} kinds" * (len(set(kinds)) < len(kinds))
        raise InputError(f"{source}: has {len(instructions):,} with an answer; {held_out}")
    divided = ([instructions[index] for index in part] for part in parts)
    return Splits(*divided, num_dropped=len(every) - len(instructions))


def digest(part: TextData | Sequence[Instruction]) -> str:
    """Return a fingerprint of texts with their classes, or of instructions with their answers, in their order."""
    is_text = isinstance(part, TextData)
    content = [part.texts, part.text_pair, [part.names[label] for label in part.labels]] if is_text else part
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a UTF-8 file: a table whose first row names the columns, or objects of JSON. In a CSV double
    quotes enclose fields, which then may hold commas and line breaks; a TSV has a row a line, and a quote in it is a
    character like others."""
    suffix = path.suffix.lower().replace("ndjson", "jsonl")
    if suffix not in _SUFFIXES:
        raise InputError(f"{path}: is of an unknown format; give a file whose suffix is one of {', '.join(_SUFFIXES)}")
    text = _content(path)
    # Only line feeds end a line: texts hold other characters that Python too takes for line ends.
    lines = [(f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if suffix == ".json":
        values = parsed_json(text, str(path), list[Any]) if lines else []
        rows = [(f"{path}, entry {number}", row) for number, row in enumerate(values, 1)]
    elif suffix == ".jsonl":
        rows = [(place, parsed_json(line, place)) for place, line in lines]
    elif suffix == ".tsv":
        rows = _by_column(path, [(place, line.removesuffix("\r").split("\t")) for place, line in lines])
    else:
        rows = _by_column(path, _from_csv(path, text))
    for place, row in rows:
        if not isinstance(row, dict):
            raise InputError(f"{place}: must be an object, got a {type(row).__name__}")
    if not rows:
        raise InputError(f"{path}: holds no rows")
    return rows


def _content(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({error})") from error


def _from_csv(path: Path, text: str) -> list[tuple[str, list[str]]]:
    csv.field_size_limit(2**31 - 1)  # 131072 characters by default; there are longer texts
    # Strict: a quote that is a mere character ends in an error and not in rows that swallow the next ones.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        return [(f"{path}, line {reader.line_num}", fields) for fields in reader if fields]
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}") from error


def _by_column(path: Path, table: list[tuple[str, list[str]]]) -> list[Row]:
    names = [name.strip() for name in table[0][1]] if table else []
    if len(set(names)) < len(names):
        raise InputError(f"{path}: two columns have the same name: {', '.join(names)}")
    for place, fields in table:
        if len(fields) != len(names):
            raise InputError(f"{place}: {len(fields)} fields, expected {len(names)}; a CSV may quote fields, a TSV not")
    return [(place, dict(zip(names, fields, strict=True))) for place, fields in table[1:]]


def _text(row: Row, column: str, advice: str = "") -> str:
    """Return the text in a column, or the number there in digits."""
    place, values = row
    if column not in values:
        raise InputError(f"{place}: no column {column!r}; there are {', '.join(map(repr, values)) or 'none'}{advice}")
    value = values[column]
    if isinstance(value, int):  # bool too
        return str(value).lower()
    if not isinstance(value, str):
        raise InputError(f"{place}: {column!r} must be a text, got {shown(value)}")
    return value


def read_table(path: Path, settings: TextDataSettings) -> TextData:
    """Read texts and classes from the columns of a file: those of the settings, else MNLI's, else text and label."""
    rows = read_rows(path)
    named = settings.text_column, settings.label_column, settings.second_column
    if not any(named) and all(column in rows[0][1] for column in _NLI_COLUMNS):
        return _labeled(path, rows, _NLI_COLUMNS).with_names(NLI_LABELS)
    text, label, second = columns = named[0] or "text", named[1] or "label", named[2]
    if text == label or second in (text, label):
        found = ", ".join(map(repr, filter(None, columns)))
        raise InputError(f"{path}: --text-column, --label-column and --second-column must differ, got {found}")
    return _labeled(path, rows, columns)


def read_imdb(folder: Path) -> TextData:
    """Read IMDb's reviews, `{neg,pos}/*.txt` of a folder; InputError: one is missing, empty or broken."""
    paths = [path for name in ("neg", "pos") for path in entries(folder / name) if path.suffix == ".txt"]
    rows: list[Row] = [(str(path), {"text": _content(path), "label": path.parent.name}) for path in paths]
    return _labeled(folder, rows, ("text", "label", None))


def _labeled(source: Path, rows: Iterable[Row], columns: tuple[str, str, str | None]) -> TextData:
    """Return texts, with `<br />` as a space, and classes in order, from the columns of text, class and second text."""
    text, label, second = columns
    advice = "; `cdt-fast train text` takes others by --text-column, --label-column and --second-column"
    texts: dict[str, list[str]] = {column: [] for column in (text, second) if column}
    values: list[str] = []
    num_dropped = 0
    for row in rows:
        value = _composed(_text(row, label, advice).strip())
        if value == _HIDDEN and columns == _NLI_COLUMNS:
            num_dropped += 1
            continue
        values.append(value)
        for column, part in texts.items():
            part.append(" ".join(filter(None, map(str.strip, _BREAK.split(_text(row, column, advice))))))
            if not value or not part[-1]:
                raise InputError(f"{row[0]}: {column if value else label!r} is empty")
    if not values:
        raise InputError(f"{source}: holds no labeled text")
    # Names that differ in case are different classes, but tools write true and false in several ways.
    kinds = [value.casefold() if value.casefold() in ("true", "false") else value for value in values]
    own = {kind: value for value, kind in sorted(zip(values, kinds, strict=True), reverse=True)}
    numeric = all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in own)  # Python does not turn any digits into a number
    order = sorted(own, key=int if numeric else lambda kind: (own[kind].casefold(), own[kind]))
    numbers = {kind: number for number, kind in enumerate(order)}
    classes = [numbers[kind] for kind in kinds]
    first, *pair = texts.values()
    return TextData(first, classes, [own[kind] for kind in order], *pair, num_dropped=num_dropped)


def split_text(data: TextData, validation: float = 0.1, test: float = 0.1, *, seed: int = 0) -> Splits:
    """Divide texts so that every part has its share of the different texts of each class, and `validation` and `test`
    at least one, unless their fractions are 0, in an order drawn by `seed`. Equal texts come to one part."""
    fractions = validation, test
    if sum(fractions) >= 1:
        raise InputError(f"validation and test must leave a share for training, got {validation} and {test}")
    generator = random.Random(seed)
    parts: list[list[int]] = [[], [], []]
    kinds, places = data.kinds, dict[Any, int]()
    for number, name in enumerate(data.names):
        members = [index for index, label in enumerate(data.labels) if label == number]
        generator.shuffle(members)
        count, different = len(members), len({kinds[index] for index in members})
        first, more = (max(1, round(fraction * different)) if fraction and members else 0 for fraction in fractions)
        chosen = _divided(members, kinds, (first, more), max(fractions) * count, places)
        if members and not chosen[0]:
            copied = f" of {different} kind(s)" * (different < count)
            raise InputError(
                f"class {name!r} has {count} text(s){copied}, and needs {first + more + 1}: --validation "
                f"{validation:g} takes {first}, --test {test:g} takes {more}, and one is to train on"
            )
        parts = [part + indices for part, indices in zip(parts, chosen, strict=True)]
    for part in parts:
        generator.shuffle(part)
    return Splits(*[data.subset(part) for part in parts], num_dropped=0)


def _divided(
    members: Sequence[int], kinds: Sequence[Any], sizes: tuple[int, int], most: float, places: dict[Any, int]
) -> list[list[int]]:
    """Return the members for training, validation and test, in their order, of so many kinds the last two, with all
    copies of a kind in one part, which `places` holds or is given. Kinds of more than `most` copies are trained on
    where there are others."""
    copies = Counter(kinds[index] for index in members)
    firsts = {kinds[index]: index for index in sorted(members, reverse=True)}
    # By the place of its first copy in the files: many copies would otherwise make a kind likelier to be held out.
    drawn = [kinds[index] for index in members if firsts[kinds[index]] == index and kinds[index] not in places]
    drawn.sort(key=lambda kind: copies[kind] > most)
    validation, test = sizes
    for number, kind in enumerate(drawn):
        places[kind] = 1 if number < validation else 2 if number < validation + test else 0
    return [[index for index in members if places[kinds[index]] == part] for part in range(3)]


def _parts_of(source: Path, data: TextDataSettings) -> list[Any]:
    """Return the training, validation and test texts of a file or a folder; None: no file holds them."""
    if source.is_file():
        return [read_table(source, data), None, None]
    if not source.exists():
        raise InputError(f"{source}: no such file or folder")
    if (source / "train" / "pos").is_dir():
        if data.text_column or data.label_column or data.second_column:
            raise InputError(f"{source}: is IMDb's folder, which has no columns: leave out the options that name one")
        return [read_imdb(source / "train"), None, read_imdb(source / "test")]
    parts: list[TextData | None] = []
    for names in _PARTS:
        there = [path for name in names for suffix in _SUFFIXES if (path := source / f"{name}{suffix}").is_file()]
        if len(there) > 1:
            raise InputError(f"{source}: holds both {there[0].name} and {there[1].name}; leave one of them there")
        if not (parts or there):
            raise InputError(f"{source}: holds neither train.tsv (or .csv, .json, .jsonl) nor the folders of IMDb")
        part = read_table(there[0], data) if there else None
        parts.append(part.with_names(parts[0].names, there[0]) if part and parts and parts[0] else part)
    return parts


def _share(name: str, share: float) -> float:
    if not 0 < share < 1:
        raise InputError(f"--{name} must be a share above 0 and below 1, as no file holds that part, got {share:g}")
    return share


def _shuffled(values: Iterable[Any], seed: int) -> list[Any]:
    random.Random(seed).shuffle(shuffled := list(values))
    return shuffled
