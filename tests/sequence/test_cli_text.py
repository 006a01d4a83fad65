"""`cdt-fast train text` and `train lm` as a person calls them: what is written, and what a wrong call is answered."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from cdt_fast.files import read_json, write_json
from cdt_fast.training.loop import Trainer
from tests.runs import Call
from tests.tiny import words_of_command
from tests.tiny_text import TINY_LANGUAGE, TINY_TEXT, write_instructions, write_language_model, write_table

transformers = pytest.importorskip("transformers")
COLUMNS = ("review", "sentiment")
TEXT = words_of_command(TINY_TEXT, text_column=COLUMNS[0], label_column=COLUMNS[1])
_OF_CONSTRAINTS = tuple(f"--{name.replace('_', '-')}=" for name in TINY_TEXT["constraints"])


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("texts") / "reviews.tsv", names=COLUMNS)


@pytest.fixture(scope="session")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_instructions(tmp_path_factory.mktemp("instructions") / "alpaca.json")


@pytest.fixture(scope="session")
def language(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the words of a command that trains a tiny language model."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    return words_of_command(TINY_LANGUAGE, model=write_language_model(folder))


def train_two(call: Call, task: str, source: Path, words: list[str], folder: Path) -> list[Path]:
    runs = [folder / "constrained", folder / "plain"]
    for run, kind in zip(runs, ("--constrained", "--no-constrained"), strict=True):
        taken = [word for word in words if kind == "--constrained" or not word.startswith(_OF_CONSTRAINTS)]
        answer = call("train", task, source, *taken, kind, "--out", run)
        assert answer.status == 0, answer
        assert ("texts: 64 train, 8 validation, 8 test; classes: neg, pos\n" in answer.err) == (task == "text")
    return runs


@pytest.mark.parametrize("task", ["text", "lm"])
def test_train_evaluate_and_compare(
    call: Call, task: str, table: Path, instructions: Path, language: list[str], tmp_path: Path
) -> None:
    source, words = (table, TEXT) if task == "text" else (instructions, language)
    runs = train_two(call, task, source, words, tmp_path)
    for run in runs:
        for name in ("config.toml", "metrics.jsonl", "model/config.json", "checkpoint/state.safetensors"):
            assert (run / name).is_file()
        assert not [path for path in run.rglob("*") if ".tmp" in path.name]
        report = (run / "report.html").read_text(encoding="utf-8")
        assert "Test texts" in report
        assert ("Multipliers" in report) == (run == runs[0])

    first = read_json(runs[0] / "evaluation.json")
    assert call("evaluate", runs[0], "--limit", 1).status == 0
    assert "not better than a guess" in read_json(runs[0] / "evaluation.json")["verdict"]  # of one text
    assert call("evaluate", runs[0], "--limit", 2).status == 0
    limited = read_json(runs[0] / "evaluation.json")
    assert limited["test_texts"] == 2 < first["test_texts"]
    assert f"different data: answers is {first['answers']} and {limited['answers']}" in call("compare", *runs).line()
    answer = call("evaluate", runs[0])
    assert answer.status == 0
    assert read_json(runs[0] / "evaluation.json") == first

    answer = call("compare", *runs, "--out", tmp_path / "out")
    assert answer.status == 0, answer
    label = "text-ut" if task == "text" else "llama"
    labels = [f"constrained (constrained, {label})", f"plain (unconstrained, {label})"]
    report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for run, name in zip(runs, labels, strict=True):
        evaluation = read_json(run / "evaluation.json")
        pairs = zip(evaluation["accuracy"], evaluation["accuracy_margin"], strict=True)
        cells = [f"<td>{accuracy:.3f} ±{margin:.3f}</td>" for accuracy, margin in pairs]
        assert f"<td>{name}</td>" in report
        assert "".join([*cells, f"<td>{evaluation['auc']:.3f}</td>"]) in report
        assert task == "text" or f"<td>{math.exp(evaluation['depth_loss'][0][-1]):.4g}</td>" in report
    assert ("perplexity" in report) == (task == "lm")
    captions = re.findall("<figcaption>([^<,;]+)", report)
    ratios = "Ratios of the losses of a sample after and before a layer: the share of them below"
    assert captions == ["Accuracy over γ", "Held-out loss at every depth", ratios, "Multipliers during the training"]
    write_json(runs[1] / "evaluation.json", {**read_json(runs[1] / "evaluation.json"), "test_digest": "of others"})
    assert "different data: test_digest is 'of others'" in call("compare", *runs).line()


BAD = [
    ("text", [], ["SOURCE is missing"]),
    ("text", ["missing.tsv"], ["missing.tsv", "no such file"]),
    ("text", ["TABLE", "--model", "no/such-model"], ["no/such-model", "local folder", "--download"]),
    ("text", ["TABLE", "--embedding", "no-such-folder"], ["no-such-folder", "local folder"]),
    ("text", ["TABLE", "--gammas", "1,0"], ["[evaluation] gammas must be ascending"]),
    ("text", ["TABLE", "--gamma", "0,1"], ["[data] gamma must be a valid number"]),
    ("text", ["TABLE", "--validation", "0.6", "--test", "0.6"], ["must leave a share for training"]),
    ("text", ["TABLE", "--least-count", "99"], ["least_count is 99, and no word is as frequent"]),
    ("text", ["TABLE", "--max-tokens", "1" + "0" * 30], ["[data] max_tokens must be less than 2147483648, got '1000"]),
    ("text", ["ONE CLASS"], ["all the training texts are of one class, 'pos'"]),
    ("text", ["TABLE", "--model", "WORDLESS"], ["wordless: holds no tokenizer"]),
    ("text", ["TABLE", "--model", "FOLDER"], ["folder: cannot be loaded as a transformers model"]),
    ("text", ["TABLE", "--model", "PICTURES"], ["cannot be loaded as a transformers model", "CLIPConfig", "…)"]),
    ("text", ["FOLDER"], ["holds neither train.tsv"]),
    ("lm", [], ["SOURCE is missing"]),
    ("lm", ["missing.json"], ["missing.json: cannot be read", "No such file"]),
    ("lm", ["INSTRUCTIONS", "--taps", "0,9"], ["taps must be a list of increasing depths between 0 and 2"]),
    ("lm", ["INSTRUCTIONS", "--taps", "0,1"], ["[model] taps must be at least two depths that end with the last, 2"]),
    ("lm", ["INSTRUCTIONS", "--model", "no/such-model"], ["no/such-model", "local folder", "--download"]),
]


def save_without_tokenizer(folder: Path) -> Path:
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.importorskip("google.protobuf")  # without it these versions name it as the reason

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    transformers.BertModel(transformers.BertConfig(vocab_size=20, **sizes)).save_pretrained(folder)
    return folder


def save_for_pictures(folder: Path) -> Path:
    """Save a model of texts and pictures, which is no classifier, with a tokenizer that can be read."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nfilm\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    transformers.CLIPConfig().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("task", "words", "facts"), BAD, ids=lambda value: "")
def test_bad_input_is_one_line_and_leaves_nothing(
    call: Call,
    table: Path,
    instructions: Path,
    language: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    words: list[str],
    facts: list[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = tmp_path / "sources"
    (source / "folder").mkdir(parents=True)
    (source / "one.tsv").write_text("review\tsentiment\n" + "".join(f"film {n}\tpos\n" for n in range(40)))
    places = {"TABLE": table, "INSTRUCTIONS": instructions}
    places |= {"FOLDER": source / "folder", "ONE CLASS": source / "one.tsv"}
    for name, build in (("WORDLESS", save_without_tokenizer), ("PICTURES", save_for_pictures)):
        if name in words:
            places[name] = build(source / name.lower())
    settings = TEXT if task == "text" else language
    if {"--model", "--embedding"} & {*words}:  # those of networks and vocabularies of one's own are refused beside it
        own = ("--layers", "--width", "--least-count")
        own = own if "--model" in words else ("--least-count",)
        settings = [word for word in settings if word.partition("=")[0] not in own]
    monkeypatch.chdir(tmp_path)
    answer = call("train", task, *settings, *(places.get(word, word) for word in words), "--out", tmp_path / "run")
    assert answer.status == 2, answer
    *said, line = answer.err.splitlines()
    assert all(any(word in text for word in ("train, ", "times the FLOP", "warning: ")) for text in said), said
    assert line.startswith("cdt-fast")
    for fact in facts:
        assert fact in line
    assert not answer.out
    assert not (tmp_path / "run").exists()


ALLOCATORS = [RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError("CUDA out of memory.")]


@pytest.mark.parametrize("error", [MemoryError(), *ALLOCATORS])
def test_running_out_of_memory_names_the_settings_that_lower_the_need(
    call: Call, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def exhausted(_: Trainer) -> None:
        raise error

    monkeypatch.setattr(Trainer, "_train_step", exhausted)
    answer = call("train", "text", table, *TEXT, "--out", tmp_path / "run")
    assert answer.status == 2
    assert answer.err.splitlines()[-1].startswith("cdt-fast: out of memory; a smaller --batch needs less")
    assert not (tmp_path / "run").exists()
