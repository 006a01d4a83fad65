from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import annotated_types
import pytest

from cdt_fast.checks import InputError, printable
from cdt_fast.files import read_json, read_toml, replaced_atomically, write_json, write_text


def test_a_file_appears_whole_with_the_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "note.txt"
    write_text(path, "ℓ_0\n")
    assert path.read_text(encoding="utf-8") == "ℓ_0\n"
    assert os.listdir(path.parent) == ["note.txt"]
    os.umask(mask := os.umask(0))
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("failure", [RuntimeError("no"), KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_after_a_failure_the_old_file_is_as_it_was(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "note.txt"
    path.write_text("old")

    def fail() -> None:
        with replaced_atomically(path) as temporary:
            temporary.write_text("half of the n")
            raise failure

    with pytest.raises(type(failure)) as caught:
        fail()
    if isinstance(caught.value, OSError):
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["note.txt"]


def test_what_a_killed_process_left_is_removed_and_what_a_running_one_writes_is_not(tmp_path: Path) -> None:
    killed, other = tmp_path / ".note-00000000.tmp.txt", tmp_path / ".note-old-00000000.tmp.txt"
    for path in (killed, other):
        path.touch()
    with replaced_atomically(tmp_path / "note.txt") as running:
        write_text(tmp_path / "note.txt", "of another process")
        running.write_text("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"note.txt": "new", other.name: ""}


def test_json_is_read_back_and_numbers_it_cannot_hold_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "values.json"
    write_json(path, {"a": [1.5, None, "γ"]})
    assert read_json(path) == {"a": [1.5, None, "γ"]}
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": [1.5, None, "γ"]}


BROKEN = {
    "cut": b'{"a": 1',
    "not UTF-8": b"\xff\xfe",
    "5,000 digits": b'{"a": ' + b"1" * 5000 + b"}",
    "deep objects": b'{"a": ' * 5000 + b"1" + b"}" * 5000,
    "half of a pair": b'{"a": "\\ud800"}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_json_file_that_is_not_whole_is_named_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "values.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_json(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(path))


BROKEN_TOML = [b"a = " + b"1" * 5000, b"a = " + b"[" * 5000 + b"]" * 5000, b"a = \xff", b"[a"]


@pytest.mark.parametrize("content", BROKEN_TOML)
def test_a_toml_file_that_is_none_is_named_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"config\.toml: cannot be read as TOML"):
        read_toml(path)


def test_a_file_that_is_missing_or_a_folder_is_refused(tmp_path: Path) -> None:
    for read in (read_json, read_toml):
        with pytest.raises(InputError, match=r"none: cannot be read as (JSON|TOML) \(No such file"):
            read(tmp_path / "none")
        with pytest.raises(InputError, match=r"cannot be read as (JSON|TOML) \(Is a directory"):
            read(tmp_path)


@dataclass
class Entry:
    step: Annotated[int, annotated_types.Ge(0)]
    loss: list[float]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"step": -1, "loss": []}, "step: Input should be greater than or equal to 0, got -1"),
        ({"loss": 1}, "step: Field required, got {'loss': 1}; and 1 more"),
        ([], "Input should be an object, got []"),
        ({"step": 1, "loss": ["word " * 99]}, "loss.0: Input should be a valid number"),
    ],
)
def test_a_value_of_another_kind_is_named_with_its_place(tmp_path: Path, value: object, message: str) -> None:
    path = tmp_path / "entry.json"
    write_json(path, {"step": 3, "loss": [1, 0.5]})
    assert read_json(path, Entry) == Entry(3, [1.0, 0.5])
    write_json(path, value)
    with pytest.raises(InputError) as caught:
        read_json(path, Entry)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert len(str(caught.value)) < 250 + len(str(path))


def test_control_characters_are_spelled_out() -> None:
    assert printable("é γ 漢\t\n") == "é γ 漢\t\n"
    assert printable("\x1b[2J\x07\r\u202e\udc80") == r"\x1b[2J\x07\r\u202e\udc80"
