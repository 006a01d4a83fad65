"""Labeled texts, instructions and words: the layouts as they are published, and one clear error for what is broken."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from cdt_fast.checks import InputError
from cdt_fast.sequence.data import (
    NLI_LABELS,
    Instruction,
    TextData,
    load_instructions,
    load_texts,
    read_imdb,
    read_table,
    split_text,
)
from cdt_fast.sequence.settings import TextDataSettings
from cdt_fast.sequence.tokenizers import encoded_texts, load_tokenizer, word_tokenizer
from cdt_fast.tasks import TASKS
from tests.tiny_text import write_instructions, write_table


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path: Path, **settings: Any) -> TextData:
    return read_table(path, TextDataSettings(**settings))


def load(task: str, source: Path, **shares: float) -> Any:
    config: Any = TASKS[task].settings()
    config.update("data", {"source": str(source), **shares})
    return load_texts(config.data) if task == "text" else load_instructions(config)


# Files


def test_reviews_in_a_csv_with_quotes_and_line_breaks(tmp_path: Path) -> None:
    gap = " " * 300_000  # minutes, in quadratic time
    content = f'Sentiment,Text\nNegative,Bad.<br /><br />Really{gap}bad.\nNegative,"The ""best"" film,of <BR>2001\nis.'
    path = write(tmp_path / "train.csv", content + "\"\nPositive,It's 8½ minutes too short!\n")
    data = read(path, text_column="Text", label_column="Sentiment")
    assert data.texts == [f"Bad. Really{gap}bad.", 'The "best" film,of 2001\nis.', "It's 8½ minutes too short!"]
    assert (data.labels, data.names, data.text_pair) == ([0, 0, 1], ["Negative", "Positive"], None)


def test_mnli_as_glue_lays_it_out(tmp_path: Path) -> None:
    """A quote is a character, the gold label stands last, `-` where annotators disagree."""
    rows = [
        "index\tpromptID\tgenre\tsentence1\tsentence2\tlabel1\tgold_label",
        '0\t31\tfiction\t"He left\u2028early.\tHe left.\tneutral\tentailment',
        "1\t31\tfiction\tOne\x85.\tTwo.\tneutral\t-",
        '2\t12\tphone\tuh-\rhuh\tYes "no".\tneutral\tcontradiction',
    ]
    path = write(tmp_path / "MNLI" / "dev_matched.tsv", "\r\n".join(rows) + "\r\n")
    data = read(path)
    assert data.texts == ['"He left\u2028early.', "uh-\rhuh"]
    assert data.text_pair == ["He left.", 'Yes "no".']
    assert (data.labels, data.names, data.num_dropped) == ([0, 2], list(NLI_LABELS), 1)
    assert data.with_names(["contradiction", "entailment", "neutral"]).labels == [1, 0]
    named = read_table(path, TextDataSettings(label_column="genre", text_column="sentence1"))
    assert (named.names, named.text_pair) == (["fiction", "phone"], None)
    with pytest.raises(InputError, match="no column 'label'"):
        read_table(path, TextDataSettings(label_column="label"))


def test_imdb_s_tree(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("neg", "pos"):
            for number in range(12):
                review = f"{split} {name} {number}.<br /><br />End."
                write(tmp_path / "aclImdb" / split / name / f"{number}_5.txt", review)
        write(tmp_path / "aclImdb" / split / "labeledBow.feat", "1 0:2")
    write(tmp_path / "aclImdb" / "train" / "neg" / "._0_2.txt", b"\xff\xfe")
    data = read_imdb(tmp_path / "aclImdb" / "train")
    assert (data.labels, data.names) == ([0] * 12 + [1] * 12, ["neg", "pos"])
    assert data.texts[10] == "train neg 10. End."  # in natural order
    parts = load_texts(TextDataSettings(source=str(tmp_path / "aclImdb")))
    assert parts.sizes == {"training texts": 24, "test texts": 24}
    assert sorted(parts.train.texts + parts.validation.texts) == sorted(data.texts)
    assert all(text.startswith("test") for text in parts.test.texts)
    last = tmp_path / "aclImdb" / "test" / "pos" / "99_9.txt"
    for content, fact in ((" <br />\n", r"99_9\.txt: 'text' is empty"), (b"\xe9", r"99_9\.txt: cannot be read as UTF")):
        write(last, content)
        with pytest.raises(InputError, match=fact):
            read_imdb(tmp_path / "aclImdb" / "test")
    with pytest.raises(InputError, match="validation"):
        read_imdb(tmp_path / "validation")
    with pytest.raises(InputError, match="aclImdb: is IMDb's folder, which has no columns"):
        load_texts(TextDataSettings(source=str(tmp_path / "aclImdb"), label_column="label"))


ROWS = [{"body": "one, two", "kind": 10}, {"body": 'say "three"\nfour', "kind": 9}, {"body": "é", "kind": 10}]


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".ndjson", ".CSV"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_any_format_with_named_columns_gives_the_same(tmp_path: Path, suffix: str, mark: str) -> None:
    path = tmp_path / f"texts{suffix}"
    if suffix.lower() == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            file.write(mark)
            writer = csv.DictWriter(file, ["kind", "body"])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        write(path, mark + (json.dumps(ROWS) if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in ROWS)))
    data = read(path, text_column="body", label_column="kind")
    assert data.texts == [row["body"] for row in ROWS]
    assert (data.names, data.labels) == (["9", "10"], [1, 0, 1])  # 9 before 10: numbers, and no words


BROKEN: list[tuple[str, str | bytes, dict[str, Any], str]] = [
    ("a.csv", "text,kind\na,b\n", {}, r"a\.csv, line 2: no column 'label'; there are 'text', 'kind'; .*--label-column"),
    ("a.csv", "body,label\na,b\n", {}, r"no column 'text'; there are 'body', 'label'"),
    ("a.csv", "text,label\na,b\n", {"second_column": "other"}, r"no column 'other'"),
    *(
        ("a.csv", "text,label\na,b\n", options, rf"a\.csv: --text-column, .* must differ, got {found}$")
        for options, found in (
            ({"second_column": "text"}, "'text', 'label', 'text'"),
            ({"second_column": "label"}, "'text', 'label', 'label'"),
            ({"text_column": "label"}, "'label', 'label'"),
        )
    ),
    ("a.csv", "text,label\na,b\n<br />,c\n", {}, r"line 3: 'text' is empty"),
    ("a.csv", "text,label\na,b\na,\n", {}, r"line 3: 'label' is empty"),
    ("a.csv", "text,label\na,b,c\n", {}, r"3 fields, expected 2"),
    ("a.csv", "text,text\na,b\n", {}, r"two columns have the same name"),
    ("a.csv", "text,label\n", {}, r"a\.csv: holds no rows"),
    ("a.csv", "", {}, r"a\.csv: holds no rows"),
    ("a.tsv", "sentence1\tsentence2\tgold_label\na\tb\t-\n", {}, r"holds no labeled text"),
    ("a.csv", 'text,label\n"a" b,c\n', {}, r"a\.csv, line 2: .* expected"),
    ("a.csv", 'text,label\na,b\n"open,c\nd,e\n', {}, r"a\.csv, line 4: unexpected end of data"),
    ("a.tsv", 'text\tlabel\n"a\tb"\tc\n', {}, r"line 2: 3 fields, expected 2; a CSV may quote fields, a TSV not"),
    ("a.jsonl", '{"text": "a", "label": 0}\n\n{"text": \n', {}, r"line 3: cannot be read as JSON"),
    ("a.jsonl", '{"text": "a", "label": 0}\n[1]\n', {}, r"line 2: must be an object, got a list"),
    ("a.jsonl", '{"text": null, "label": 0}\n', {}, r"line 1: 'text' must be a text, got None"),
    ("a.jsonl", '{"text": "a", "label": 0.5}\n', {}, r"line 1: 'label' must be a text, got 0\.5"),
    ("a.jsonl", "\n", {}, r"holds no rows"),
    ("a.json", '{"text": "a"}', {}, r"a\.json: .*array"),
    ("a.json", "[]", {}, r"holds no rows"),
    ("a.json", '[{"text": "a", "label": 1}, 3]', {}, r"entry 2: must be an object, got a int"),
    ("a.xlsx", "text", {}, r"unknown format; give a file whose suffix is one of \.tsv, \.csv, \.json, \.jsonl"),
    *((f"a.{form}", b"text,label\ncaf\xe9,1\n", {}, "cannot be read as UTF-8 text") for form in ("csv", "json")),
]


@pytest.mark.parametrize(("name", "content", "options", "message"), BROKEN)
def test_a_broken_file_gives_one_clear_error(
    tmp_path: Path, name: str, content: str | bytes, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read(write(tmp_path / name, content), **options)


# Classes


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["us", "US", "IT", "us"], ["IT", "US", "us"]),
        (["b", "B", "a", "A"], ["A", "a", "B", "b"]),
        (["True", "false", "true", "FALSE"], ["FALSE", "True"]),
        (["1", "1.0", "0", "0.0"], ["0", "0.0", "1", "1.0"]),
        ([" caf\u00e9 ", "cafe\u0301"], ["caf\u00e9"]),
    ],
    ids=lambda values: values[0],
)
def test_within_a_file_labels_are_one_class_only_where_they_mean_the_same(
    labels: list[str], names: list[str], tmp_path: Path
) -> None:
    data = read(write(tmp_path / "a.csv", "text,label\n" + "".join(f"a,{label}\n" for label in labels)))
    assert data.names == names
    assert data.with_names(names) == data


def test_classes_follow_the_names_given_where_only_one_of_them_is_meant(tmp_path: Path) -> None:
    data = read(write(tmp_path / "a.csv", "text,label\na,Pos\nb,neg\nc,pos\nd,NEG\n"))
    data = data.with_names(["POS", "NEG", "MIXED"])
    assert (data.labels, data.names) == ([0, 1, 0, 1], ["POS", "NEG", "MIXED"])
    assert data.with_names(["neg", "mixed", "pos"]).labels == [2, 0, 2, 0]
    with pytest.raises(InputError, match=r"label 'MIXED' is not among .*: 'neg', 'pos'"):
        data.with_names(["neg", "pos"])
    data = read(write(tmp_path / "b.csv", "text,label\na,US\nb,us\n"))
    assert data.with_names(["us", "it", "US"]).labels == [2, 0]
    other = read(write(tmp_path / "c.csv", "text,label\na,Us\n"))
    assert other.with_names(["it", "US"]).labels == [1]
    with pytest.raises(InputError, match=r"label 'Us' is not among .*: 'US', 'us'"):
        other.with_names(data.names)


# Parts


def test_a_split_keeps_the_proportions_and_depends_on_the_seed_alone() -> None:
    def texts(*counts: int) -> TextData:
        labels = [label for label, count in enumerate(counts) for _ in range(count)]
        return TextData([f"text {n}" for n in range(len(labels))], labels, [f"class {n}" for n in range(len(counts))])

    data = texts(100, 40, 10)
    splits = split_text(data, 0.1, 0.2, seed=4)
    parts = (splits.train, splits.validation, splits.test)
    assert [[part.labels.count(label) for label in range(3)] for part in parts] == [[70, 28, 7], [10, 4, 1], [20, 8, 2]]
    assert sorted(text for part in parts for text in part.texts) == sorted(data.texts)
    classes = dict(zip(data.texts, data.labels, strict=True))
    assert all(classes[text] == label for part in parts for text, label in zip(part.texts, part.labels, strict=True))
    assert splits.train.labels != sorted(splits.train.labels)
    assert split_text(data, 0.1, 0.2, seed=4) == splits != split_text(data, 0.1, 0.2, seed=5)
    assert len(split_text(data, 0.1, 0.0).test) == 0
    assert split_text(texts(3, 3)).test.labels.count(0) == 1


@pytest.mark.parametrize("task", ["text", "lm"])
def test_copies_of_a_text_are_in_one_part(task: str, tmp_path: Path) -> None:
    rows = [{"text": f"text {n % 30}", "label": str(n % 30 % 2), "instruction": f"Say {n % 30}."} for n in range(300)]
    rows[31]["instruction"] += " "
    rows[7]["label"] = "0"  # of a text that is elsewhere of the other class
    content = json.dumps([{**row, "output": f"{number}"} for number, row in enumerate(rows)])
    splits = load(task, write(tmp_path / "rows.json", content))
    kinds = [part.texts if task == "text" else [entry.instruction.strip() for entry in part] for part in splits[:3]]
    assert [len(set(part)) for part in kinds] == ([22, 4, 4] if task == "text" else [26, 2, 2])
    assert sum(map(len, kinds)) == 300
    assert len(set().union(*kinds)) == 30
    if task == "text":
        assert splits.num_seen == 0
        few = write(tmp_path / "few.json", json.dumps(rows[:2] * 20))
        with pytest.raises(InputError, match=r"class '0' has 20 text\(s\) of 1 kind\(s\), and needs"):
            load(task, few)


@pytest.mark.parametrize("task", ["text", "lm"])
def test_copies_are_as_likely_in_any_part(task: str, tmp_path: Path) -> None:
    texts = [f"copied {n % 160}" if n < 800 else f"single {n}" for n in range(2000)]
    rows = [
        {"text": text, "label": str(int(text.split()[1]) % 2), "instruction": text, "output": "yes"} for text in texts
    ]
    splits = load(task, write(tmp_path / "rows.json", json.dumps(rows)), validation=0.2, test=0.2)
    parts = [part.texts if task == "text" else [entry.instruction for entry in part] for part in splits[:3]]
    assert [len(part) for part in parts] == pytest.approx([1200, 400, 400], abs=60)
    assert [sum("copied" in text for text in part) / len(part) for part in parts] == pytest.approx([0.4] * 3, abs=0.15)
    # One that is more than a part is trained on; every part has another.
    few = [{**rows[0], "text": text, "instruction": text} for text in ["one", "two", "three", *["n/a"] * 100]]
    for number in range(4):
        splits = load(task, write(tmp_path / "few.json", json.dumps(few[number:] + few[:number])))
        assert [len(part) for part in splits[:3]] == [101, 1, 1]


@pytest.mark.parametrize("task", ["text", "lm"])
def test_a_share_that_leaves_a_part_empty_is_refused(task: str, tmp_path: Path) -> None:
    source = write_table(tmp_path / "a.tsv") if task == "text" else write_instructions(tmp_path / "a.json")
    for part in ("validation", "test"):
        for share in (0.0, 1.0, -0.5):
            with pytest.raises(InputError, match=rf"--{part} must be a share above 0 and below 1.* got {share:g}$"):
                load(task, source, **{part: share})


def test_the_share_of_a_part_that_a_file_holds_does_not_matter(tmp_path: Path) -> None:
    write_table(tmp_path / "train.tsv")
    write_table(tmp_path / "dev.tsv", count=10, seed=1)
    splits = load("text", tmp_path, validation=0.0)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [72, 10, 8]
    assert splits._replace(test=splits.train.subset([0, 1, 1])).num_seen == 3
    fewer = splits.limited(5)
    assert [len(part) for part in fewer[:3]] == [72, 10, 5]
    assert fewer.test == splits.test.subset(range(5))
    assert len({*fewer.test.labels}) > 1, "they are in no order"
    assert len(splits.limited(None).test) == len(splits.limited(99).test) == 8
    with pytest.raises(InputError, match="--test must be a share"):
        load("text", tmp_path, validation=0.0, test=0.0)
    write(tmp_path / "test.csv", "text,label\na,other\n")
    with pytest.raises(InputError, match=r"test\.csv: the label 'other' is not among"):
        load("text", tmp_path)
    rows = [f"text {number}\t{('neutral', 'entailment')[number % 2]}\tother" for number in range(40)]
    lines = ["sentence1\tgold_label\tsentence2", *rows, "text\t-\tother"]
    assert load("text", write(tmp_path / "MNLI" / "train.tsv", "\n".join(lines) + "\n")).num_dropped == 1
    write(tmp_path / "MNLI" / "dev_matched.tsv", "\n".join(lines[:3]) + "\n")
    splits = load("text", tmp_path / "MNLI")
    assert (splits.train.names, splits.test.labels, len(splits.train)) == (list(NLI_LABELS), [1, 0], 36)


# Instructions


def test_instructions_in_alpaca_s_form(tmp_path: Path) -> None:
    entries = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3 <br />"},
        {"instruction": "Sing. ", "input": "", "output": "La\n"},
        {"instruction": "Say nothing.", "input": "", "output": " \n"},
        {"instruction": "Wait.", "input": " ", "output": "    return 1\n"},
    ]
    splits = load("lm", write(tmp_path / "alpaca.json", json.dumps(entries)), validation=0.1, test=0.1)
    assert splits.limited(1).test == splits.test[:1]
    every = sorted([*splits.train, *splits.validation, *splits.test])
    assert every == [
        Instruction("Add.", "1 and 2", "3 <br />"),
        ("Sing. ", "", "La\n"),
        ("Wait.", " ", "    return 1\n"),
    ]
    assert splits.num_dropped == 1
    task = "Below is an instruction that describes a task{}."
    task += " Write a response that appropriately completes the request.\n\n### Instruction:\n"
    paired = task.format(", paired with an input that provides further context")
    assert every[0].prompt == f"{paired}Add.\n\n### Input:\n1 and 2\n\n### Response:\n"
    assert every[1].prompt == f"{task.format('')}Sing. \n\n### Response:\n"
    assert every[2].prompt == f"{task.format('')}Wait.\n\n### Response:\n"


@pytest.mark.parametrize(("value", "kept"), [(0, "0"), (False, "false"), (None, "")])
def test_only_null_is_no_input(tmp_path: Path, value: Any, kept: str) -> None:
    entries = [{"instruction": f"Double {n}.", "input": value, "output": "x"} for n in range(3)]
    splits = load("lm", write(tmp_path / "a.json", json.dumps(entries)))
    assert splits.train[0].input == kept


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"input": "", "output": "x"}, r"entry 1: no column 'instruction'; there are 'input', 'output'"),
        ({"instruction": "a"}, r"no column 'output'; there are 'instruction'$"),
        ({"instruction": " ", "output": "x"}, r"'instruction' is empty"),
        ({"instruction": "a", "output": [3]}, r"'output' must be a text, got \[3\]"),
        ({"instruction": "a", "input": [], "output": "x"}, r"'input' must be a text, got \[\]"),
        ({"instruction": "a", "output": ""}, r"no instruction with an answer"),
        ({"instruction": "a", "output": "b"}, r"has 1 with an answer; 1 for --validation and 1 for --test leave none"),
    ],
)
def test_broken_instructions_are_named(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load("lm", write(tmp_path / "a.json", json.dumps([entry])))


# Words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's GOOD, isn’t it?", "it's good , isn’t it ?"),
        ("这部iPhone很好。", "这 部 iphone 很 好 。"),
        ("この映画スマホ、ｶﾞｲﾄﾞ", "こ の 映 画 ス マ ホ 、 ガ イ ド"),
        ("หนังดี", "ห นั ง ดี"),
        ("ຮູບດີ", "ຮູ ບ ດີ"),
        ("រឿងនេះ", "រឿ ង នេះ"),
        ("ကောင်း", "ကော င်း"),
        ("이 영화는 大韓民國", "이 영화는 大 韓 民 國"),
        ("अच्छी फिल्म है", "अच्छी फिल्म है"),
        ("فِيلْمٌ جَيِّدٌ\u200f", "فِيلْمٌ جَيِّدٌ"),
        ("cafe\u0301 CAF\u00c9", "caf\u00e9 caf\u00e9"),
        ("ｇｏｏｄ\u200bso\u00adso", "good soso"),
        ("so 👍🏽👩‍👩‍👧!", "so 👍🏽 👩‍👩‍👧 !"),
    ],
)
def test_words_of_any_script(text: str, words: str) -> None:
    assert word_tokenizer([text]).tokenize(text) == words.split()


def test_words_have_ids_by_how_often_they_occur_and_come_back(tmp_path: Path) -> None:
    made = word_tokenizer(["b a a", "C c a d", "d"], 2)
    assert made.convert_ids_to_tokens(range(len(made))) == ["<pad>", "<unk>", "<sep>", "a", "c", "d"]
    assert word_tokenizer(["d", "a C", "c b a d a"], 2).get_vocab() == made.get_vocab()
    made.save_pretrained(tmp_path)
    data = TextData(["a x D", "c"], [0, 1], ["no", "yes"], ["c a c d a", "d"])
    for tokenizer in (made, load_tokenizer(tmp_path)):
        rows = encoded_texts(data, tokenizer, 7).rows
        assert [row[0].tolist() for row in rows] == [[3, 1, 5, 2, 4, 3, 4], [4, 2, 5]]  # cut from the longer text
        assert all(row.shape[0] == 2 and (row[1] == 1).all() for row in rows)
    with pytest.raises(InputError, match=r"holds no word: ' '"):
        encoded_texts(TextData([" "], [0], ["no"]), made, 6)
