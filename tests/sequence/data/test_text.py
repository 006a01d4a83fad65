"""Labeled texts, instructions and words: the layouts as they are published, and one clear error for what is broken."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast.checks import InputError
from cdt_fast.sequence.corpus import Instruction, instructions_of
from cdt_fast.sequence.data.rows import read_rows
from cdt_fast.sequence.data.text import NLI_LABELS, TextData, read_imdb, read_table, split_text
from cdt_fast.sequence.data.vocabulary import Vocabulary, words_of
from cdt_fast.sequence.settings import TextDataSettings


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path: Path, names: Any = None, **settings: Any) -> TextData:
    return read_table(path, TextDataSettings(**settings), names)


REVIEWS = (
    'Sentiment\tText\nNegative\tBad.<br /><br />Really  bad.\nNegative\t"The ""best"" film\tof <BR>2001\nis dull."\n'
)


def test_reviews_in_a_tsv_with_quotes_and_line_breaks(tmp_path: Path) -> None:
    path = write(tmp_path / "train.tsv", REVIEWS + "Positive\tIt's 8½ minutes too short!\n")
    data = read(path, text_column="Text", label_column="Sentiment")
    assert data.texts == ["Bad. Really  bad.", 'The "best" film\tof 2001\nis dull.', "It's 8½ minutes too short!"]
    assert (data.labels, data.names, data.text_pair) == ([0, 0, 1], ["Negative", "Positive"], None)


def mnli_tree(folder: Path) -> Path:
    """As GLUE lays it out: a quote is a character, the gold label stands last, `-` where annotators disagree."""
    head = "index\tpromptID\tgenre\tsentence1\tsentence2\tlabel1\tgold_label"
    rows = [
        '0\t31\tfiction\t"He left\u2028early.\tHe left.\tneutral\tentailment',
        "1\t31\tfiction\tOne\x85.\tTwo.\tneutral\t-",
        '2\t12\tphone\tuh-\rhuh\tYes "no".\tneutral\tcontradiction',
    ]
    write(folder / "MNLI" / "dev_matched.tsv", "\r\n".join([head, *rows]) + "\r\n")
    return folder


def test_mnli_as_glue_lays_it_out(tmp_path: Path) -> None:
    path = mnli_tree(tmp_path) / "MNLI" / "dev_matched.tsv"
    data = read(path, quoting=False)
    assert data.texts == ['"He left\u2028early.', "uh-\rhuh"]
    assert data.text_pair == ["He left.", 'Yes "no".']
    assert (data.labels, data.names, data.num_dropped) == ([0, 2], list(NLI_LABELS), 1)
    assert data.with_names(["contradiction", "entailment", "neutral"]).labels == [1, 0]


def test_pairs_without_a_header_or_a_suffix(tmp_path: Path) -> None:
    path = write(tmp_path / "mnli_matched", 'neutral\tIn "A , b .\tc .\nentailment\td\te\n')
    data = read(
        path,
        names=NLI_LABELS,
        text_column="1",
        label_column="0",
        second_column="2",
        format="tsv",
        header=False,
        quoting=False,
    )
    assert (data.texts, data.text_pair, data.labels) == (['In "A , b .', "d"], ["c .", "e"], [1, 0])


def imdb_tree(folder: Path, count: int = 4) -> Path:
    for split in ("train", "test"):
        for name, rating in (("neg", 2), ("pos", 9)):
            for number in range(count):
                content = f"{split} {name} {number}.<br /><br />End."
                write(folder / "aclImdb" / split / name / f"{number}_{rating}.txt", content)
        write(folder / "aclImdb" / split / "labeledBow.feat", "1 0:2")
    write(folder / "aclImdb" / "train" / "neg" / "._0_2.txt", b"\xff\xfe")
    return folder


def test_imdb_s_tree(tmp_path: Path) -> None:
    root = imdb_tree(tmp_path, 12)
    data = read_imdb(root)
    assert data.labels == [0] * 12 + [1] * 12
    assert data.texts[10] == "train neg 10. End."  # in natural order
    assert data.names == ["neg", "pos"]
    assert read_imdb(root / "aclImdb") == data
    assert data.shuffled(0) == data.shuffled(0) != data.shuffled(1)
    assert sorted(data.shuffled(0).texts) == sorted(data.texts)
    assert all(text.startswith("test") for text in read_imdb(root, "test").texts)


def test_what_is_missing_from_imdb_s_tree_is_named(tmp_path: Path) -> None:
    root = imdb_tree(tmp_path)
    with pytest.raises(InputError, match="validation"):
        read_imdb(root, "validation")
    write(root / "aclImdb" / "test" / "pos" / "9_9.txt", " <br />\n")
    with pytest.raises(InputError, match=r"9_9\.txt: 'text' is empty"):
        read_imdb(root, "test")
    write(root / "aclImdb" / "test" / "pos" / "9_9.txt", b"\xe9")
    with pytest.raises(InputError, match=r"9_9\.txt: cannot be read as UTF-8"):
        read_imdb(root, "test")


ROWS = [{"body": "one, two", "kind": 10}, {"body": 'say "three"\nfour', "kind": 9}, {"body": "é", "kind": 10}]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".CSV"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_any_format_with_named_columns_gives_the_same(tmp_path: Path, suffix: str, mark: str) -> None:
    path = tmp_path / f"texts{suffix}"
    if suffix.lower() in (".csv", ".tsv"):
        with path.open("w", encoding="utf-8", newline="") as file:
            file.write(mark)
            writer = csv.DictWriter(file, ["kind", "body"], delimiter="\t" if suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        lines = json.dumps(ROWS) if suffix == ".json" else "\n".join([json.dumps(row) for row in ROWS] + [""])
        write(path, mark + lines)
    data = read(path, text_column="body", label_column="kind")
    assert data.texts == [row["body"] for row in ROWS]
    assert (data.names, data.labels) == (["9", "10"], [1, 0, 1])  # 9 before 10: numbers, and no words


def test_classes_that_differ_in_case_follow_the_names_given(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\na,Pos\nb,neg\nc,pos\nd,NEG\n")
    data = read_table(path, names=["POS", "NEG", "MIXED"])
    assert (data.labels, data.names) == ([0, 1, 0, 1], ["POS", "NEG", "MIXED"])
    assert data.with_names(["neg", "mixed", "pos"]).labels == [2, 0, 2, 0]
    with pytest.raises(InputError, match=r"label 'MIXED' is not among .*: 'neg', 'pos'"):
        data.with_names(["neg", "pos"])


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
    data = read_table(write(tmp_path / "a.csv", "text,label\n" + "".join(f"a,{label}\n" for label in labels)))
    assert data.names == names
    assert data.with_names(names) == data


def test_a_label_that_may_be_either_of_two_classes_is_refused(tmp_path: Path) -> None:
    data = read_table(write(tmp_path / "a.csv", "text,label\na,US\nb,us\n"))
    assert data.with_names(["us", "it", "US"]).labels == [2, 0]
    other = read_table(write(tmp_path / "b.csv", "text,label\na,Us\n"))
    assert other.with_names(["it", "US"]).labels == [1]
    with pytest.raises(InputError, match=r"label 'Us' is not among .*: 'US', 'us'"):
        other.with_names(data.names)


BROKEN: list[tuple[str, str, dict[str, Any], str]] = [
    ("a.csv", "text,kind\na,b\n", {}, r"a\.csv, row 2: no column 'label'; there are 'text', 'kind'; .*--label-column"),
    ("a.csv", "body,label\na,b\n", {}, r"no column 'text'; there are 'body', 'label'"),
    ("a.csv", "text,label\na,b\n", {"second_column": "other"}, r"no column 'other'"),
    ("a.csv", "text,label\na,b\n<br />,c\n", {}, r"row 3: 'text' is empty"),
    ("a.csv", "text,label\na,b\na,\n", {}, r"row 3: 'label' is empty"),
    ("a.csv", "text,label\na,b\na,c\n", {"names": ["b", "d"]}, r"label 'c' is not among .*: 'b', 'd'"),
    ("a.csv", "text,label\na,b,c\n", {}, r"3 fields, expected 2"),
    ("a.csv", "text,text\na,b\n", {}, r"two columns have the same name"),
    ("a.csv", "text,label\n", {}, r"a\.csv: holds no rows"),
    ("a.csv", "", {}, r"a\.csv: holds no rows"),
    ("a.tsv", "sentence1\tsentence2\tgold_label\na\tb\t-\n", {}, r"holds no labeled text"),
    ("a.tsv", 'text\tlabel\n"a" b\tc\n', {}, r"after the start: .*--no-quoting"),
    ("a.tsv", 'text\tlabel\na\tb\n"open\tc\nd\te\n', {}, r"after row 2: .*--no-quoting"),
    ("a.tsv", 'text\tlabel\n"a\tb"\tc\n', {"quoting": False}, r"3 fields, expected 2.*--quoting"),
    ("a.jsonl", '{"text": "a", "label": 0}\n\n{"text": \n', {}, r"line 3: cannot be read as JSON"),
    ("a.jsonl", '{"text": "a", "label": 0}\n[1]\n', {}, r"line 2: must be an object, got a list"),
    ("a.jsonl", '{"text": null, "label": 0}\n', {}, r"line 1: 'text' must be a text, got None"),
    ("a.jsonl", '{"text": "a", "label": 0.5}\n', {}, r"line 1: 'label' must be a text, got 0\.5"),
    ("a.jsonl", "\n", {}, r"holds no rows"),
    ("a.jsonl", '{"text": "a", "label": ' + "9" * 5000 + "}", {}, r"line 1: cannot be read as JSON .*digits"),
    ("a.jsonl", '{"text": "\\ud800", "label": 1}', {}, r"line 1: cannot be read as JSON .*surrogates"),
    ("a.json", "[" * 5000 + "]" * 5000, {}, r"cannot be read as JSON .*nested deeper"),
    ("a.json", '{"text": "a"}', {}, r"a\.json: .*list"),
    ("a.json", "[]", {}, r"holds no rows"),
    ("a.json", '[{"text": "a", "label": 1}, 3]', {}, r"entry 2: must be an object, got a int"),
    ("a.xlsx", "text", {}, r"unknown format; give one of tsv, csv, json, jsonl \(--format\)"),
]


@pytest.mark.parametrize(("name", "content", "options", "message"), BROKEN)
def test_a_broken_file_gives_one_clear_error(
    tmp_path: Path, name: str, content: str, options: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(InputError, match=message):
        read(path, **options)


def test_a_missing_file_and_one_that_is_not_utf_8(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.csv: cannot be read"):
        read_table(tmp_path / "gone.csv")
    for name in ("a.csv", "a.jsonl", "a.json"):
        with pytest.raises(InputError, match=r"cannot be read as UTF-8 text"):
            read_table(write(tmp_path / name, b"text,label\ncaf\xe9,1\n"))


def texts(counts: list[int]) -> TextData:
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    return TextData(
        [f"text {index}" for index in range(len(labels))], labels, [f"class {n}" for n in range(len(counts))]
    )


def test_a_split_keeps_the_proportions_and_depends_on_the_seed_alone() -> None:
    data = texts([100, 40, 10])
    splits = split_text(data, 0.1, 0.2, seed=4)
    parts = (splits.train, splits.validation, splits.test)
    assert [[part.labels.count(label) for label in range(3)] for part in parts] == [[70, 28, 7], [10, 4, 1], [20, 8, 2]]
    assert sorted(text for part in parts for text in part.texts) == sorted(data.texts)
    classes = dict(zip(data.texts, data.labels, strict=True))
    assert all(classes[text] == label for part in parts for text, label in zip(part.texts, part.labels, strict=True))
    assert splits.train.labels != sorted(splits.train.labels)
    assert split_text(data, 0.1, 0.2, seed=4) == splits
    assert split_text(data, 0.1, 0.2, seed=5) != splits
    assert len(split_text(data, 0.1, 0.0).test) == 0
    assert split_text(texts([3, 3])).test.labels.count(0) == 1


ALPACA: list[dict[str, Any]] = [
    {"instruction": "Add.", "input": "1 and 2", "output": "3 <br />"},
    {"instruction": "Sing. ", "input": "", "output": "La\n"},
    {"instruction": "Say nothing.", "input": "", "output": ""},
    {"instruction": "Wait.", "output": "Ok."},
]


def test_instructions_in_alpaca_s_form(tmp_path: Path) -> None:
    path = write(tmp_path / "alpaca.json", json.dumps(ALPACA))
    read, num_dropped = instructions_of(path, read_rows(path))
    assert num_dropped == 1
    assert read == [
        Instruction("Add.", "1 and 2", "3 <br />"),
        Instruction("Sing.", "", "La"),
        Instruction("Wait.", "", "Ok."),
    ]
    assert read[0].prompt.endswith("### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n")
    assert "Input" not in read[1].prompt
    assert read[1].prompt.endswith("### Instruction:\nSing.\n\n### Response:\n")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"input": "", "output": "x"}, r"entry 1: no column 'instruction'; there are 'input', 'output'"),
        ({"instruction": "a"}, r"no column 'output'; there are 'instruction'$"),
        ({"instruction": " ", "output": "x"}, r"'instruction' is empty"),
        ({"instruction": "a", "output": [3]}, r"'output' must be a text, got \[3\]"),
        ({"instruction": "a", "output": ""}, r"no instruction with an answer"),
    ],
)
def test_broken_instructions_are_named(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.json", json.dumps([entry]))
    with pytest.raises(InputError, match=message):
        instructions_of(path, read_rows(path))


def test_words_and_their_ids(tmp_path: Path) -> None:
    assert words_of("It's GOOD, isn’t it?") == ["it's", "good", ",", "isn’t", "it", "?"]
    vocabulary = Vocabulary.build(["b a a", "C c a d", "d"], least=2)
    assert vocabulary.words == ["<pad>", "<unk>", "<sep>", "a", "c", "d"]
    assert Vocabulary.build(["b a a", "c c a d", "d"], size=4).words == ["<pad>", "<unk>", "<sep>", "a"]
    ids, lengths = vocabulary.encode(["a x D", "c"])
    assert torch.equal(ids, torch.tensor([[3, 1, 5], [4, 0, 0]]))
    assert torch.equal(lengths, torch.tensor([3, 1]))
    vocabulary.save(tmp_path / "words.json")
    assert Vocabulary.load(tmp_path / "words.json").words == vocabulary.words
    assert len(vocabulary) == 6


@pytest.mark.parametrize(
    ("text", "words"),
    [
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
def test_words_of_other_scripts(text: str, words: str) -> None:
    assert words_of(text) == words.split()


def test_a_vocabulary_saved_as_a_list_splits_as_it_did(tmp_path: Path) -> None:
    words = ["<pad>", "<unk>", "<sep>", "很好", "很", "好"]
    before = Vocabulary.load(write(tmp_path / "before.json", json.dumps(words)))
    assert before.rows(["很好 好"])[0][0].tolist() == [3, 5]
    before.save(tmp_path / "again.json")
    assert Vocabulary.load(tmp_path / "again.json").rows(["很好"])[0][0].tolist() == [3]
    Vocabulary(words).save(tmp_path / "now.json")
    assert Vocabulary.load(tmp_path / "now.json").rows(["很好"])[0][0].tolist() == [4, 5]


def test_pairs_are_cut_from_the_longer_text() -> None:
    vocabulary = Vocabulary.build(["a b c d e"])
    ids, lengths = vocabulary.encode(["a b c d", "a"], ["e", "b"], max_length=5)
    assert torch.equal(ids, torch.tensor([[3, 4, 5, 2, 7], [3, 2, 4, 0, 0]]))
    assert lengths.tolist() == [5, 3]
    assert vocabulary.encode(["a b c d"], max_length=2)[0].tolist() == [[3, 4]]
    with pytest.raises(InputError, match=r"holds no word: ' '"):
        vocabulary.encode([" "])
    with pytest.raises(InputError, match="max_length"):
        vocabulary.encode(["a"], ["b"], max_length=2)


@pytest.mark.parametrize(
    "content",
    [
        '{"version": 3, "words": ["<pad>", "<unk>", "<sep>"]}',
        '["a", "b"]',
        "{}",
        '["<pad>", "<unk>", "<sep>", "a", "a"]',
        "[1]",
        "[",
    ],
)
def test_a_broken_vocabulary_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(InputError, match=r"words\.json"):
        Vocabulary.load(write(tmp_path / "words.json", content))
