"""Texts and instructions as their settings name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cdt_fast.checks import InputError
from cdt_fast.sequence.corpus import load_instructions, load_texts
from cdt_fast.tasks import TASKS
from tests.tiny_text import write_instructions, write_table


def load(task: str, source: Path, **shares: float) -> Any:
    config: Any = TASKS[task].settings()
    config.update("data", {"source": str(source), **shares})
    return load_texts(config) if task == "text" else load_instructions(config)


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    return {"text": write_table(tmp_path / "texts.tsv"), "lm": write_instructions(tmp_path / "alpaca.json")}


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("part", ["validation", "test"])
@pytest.mark.parametrize("task", ["text", "lm"])
def test_a_share_that_leaves_a_part_empty_is_refused(
    task: str, part: str, share: float, sources: dict[str, Path]
) -> None:
    with pytest.raises(InputError, match=rf"--{part} must be a share above 0 and below 1.* got {share:g}$"):
        load(task, sources[task], **{part: share})


def test_the_share_of_a_part_that_a_file_holds_does_not_matter(tmp_path: Path) -> None:
    write_table(tmp_path / "train.tsv")
    write_table(tmp_path / "dev.tsv", count=10, seed=1)
    splits = load("text", tmp_path, validation=0.0)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [72, 10, 8]
    with pytest.raises(InputError, match="--test must be a share"):
        load("text", tmp_path, validation=0.0, test=0.0)


def test_a_row_without_a_class_is_counted_once(tmp_path: Path) -> None:
    rows = [f"text {number}\t{('neutral', 'entailment')[number % 2]}\tother" for number in range(40)]
    lines = ["sentence1\tgold_label\tsentence2", *rows, "text\t-\tother"]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    assert load("text", tmp_path / "pairs.tsv").num_dropped == 1


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `datasets.load_dataset` was asked for, and the parts that it answers with."""
    datasets = pytest.importorskip("datasets")
    hub: dict[str, Any] = {"asked": []}

    def load_dataset(name: str, subset: str | None) -> Any:
        hub["asked"].append((name, subset))
        if "parts" not in hub:
            raise ConnectionError("no network\nat all")
        return datasets.DatasetDict(hub["parts"])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return hub


def labeled(count: int, hidden: bool = False) -> Any:
    import datasets

    features = datasets.Features(
        {"premise": datasets.Value("string"), "label": datasets.ClassLabel(names=["yes", "no", "never"])}
    )
    rows = {"premise": [f"text {n}" for n in range(count)], "label": [-1 if hidden else n % 2 for n in range(count)]}
    return datasets.Dataset.from_dict(rows, features=features)


def load_from_hub(task: str, **data: Any) -> Any:
    settings = TASKS[task].settings()
    settings.update("data", {"source": "owner/name:subset", **data})
    settings.update("model", {"download": True})
    return load_texts(settings) if task == "text" else load_instructions(settings)  # pyright: ignore[reportArgumentType]


def test_texts_of_the_hub_have_the_classes_and_parts_of_their_makers(hub: dict[str, Any]) -> None:
    hub["parts"] = {"train": labeled(40), "validation": labeled(6), "test": labeled(8)}
    splits = load_from_hub("text", text_column="premise")
    assert hub["asked"] == [("owner/name", "subset")]
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [40, 6, 8]
    assert splits.train.names == splits.test.names == ["yes", "no", "never"]
    assert {splits.train.texts[n]: splits.train.labels[n] for n in range(40)} == {f"text {n}": n % 2 for n in range(40)}
    # GLUE keeps the classes of its test parts: the validation part is the test.
    hub["parts"] = {"train": labeled(40), "validation_matched": labeled(6), "test": labeled(8, hidden=True)}
    splits = load_from_hub("text", text_column="premise")
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [36, 4, 6]


def test_instructions_of_the_hub(hub: dict[str, Any], sources: dict[str, Path]) -> None:
    import datasets

    hub["parts"] = {"train": datasets.Dataset.from_list(json.loads(sources["lm"].read_text()))}
    assert load_from_hub("lm", validation=0.1, test=0.1) == load("lm", sources["lm"], validation=0.1, test=0.1)


def test_what_the_hub_does_not_give_is_refused_in_one_line(hub: dict[str, Any]) -> None:
    for task in ("text", "lm"):
        with pytest.raises(InputError, match=r"owner/name:subset: cannot be fetched from the hub \('no network"):
            load_from_hub(task)
    hub["parts"] = {"test": labeled(8)}
    for task in ("text", "lm"):
        with pytest.raises(InputError, match="has no part 'train'; there are test"):
            load_from_hub(task)
    hub["parts"] = {"train": labeled(8)}
    with pytest.raises(InputError, match=r"row 1: no column 'text'; there are 'premise', 'label'"):
        load_from_hub("text")
    with pytest.raises(InputError, match="row 1: no column 'instruction'"):
        load_from_hub("lm")


def test_nothing_is_asked_of_the_hub_without_download(hub: dict[str, Any]) -> None:
    for task in ("text", "lm"):
        with pytest.raises(InputError, match=r"owner/name: no such file or folder; .* --download"):
            load(task, Path("owner/name"))
    assert hub["asked"] == []
