from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from cdt_fast.errors import InputError
from cdt_fast.files import read_json, remove_leftovers, replaced_atomically, write_json, write_text


def test_a_file_appears_whole_with_the_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "note.txt"
    write_text(path, "ℓ_0\n")
    assert path.read_text(encoding="utf-8") == "ℓ_0\n"
    assert os.listdir(path.parent) == ["note.txt"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_the_temporary_file_has_the_suffix_of_the_target(tmp_path: Path) -> None:
    with replaced_atomically(tmp_path / "video.mp4") as temporary:
        assert temporary.suffix == ".mp4"
        assert temporary.parent == tmp_path


@pytest.mark.parametrize("failure", [RuntimeError("no"), KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_after_a_failure_the_old_file_is_as_it_was(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "note.txt"
    path.write_text("old")

    def fail() -> None:
        with replaced_atomically(path) as temporary:
            temporary.write_text("half of the n")
            raise failure

    with pytest.raises(type(failure)):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["note.txt"]


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_reported_with_the_name_of_the_target(tmp_path: Path, failure: Exception) -> None:
    path = tmp_path / "state.safetensors"
    with pytest.raises(OSError, match="No space") as caught, replaced_atomically(path):
        raise failure
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert not os.listdir(tmp_path)


def test_safetensors_reports_the_systems_error_as_expected_here(tmp_path: Path) -> None:
    """The number in the text of its error is what `replaced_atomically` reads."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "weights.safetensors"
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OSError, match="too large") as caught, replaced_atomically(path) as temporary:
            save_file({"weights": torch.zeros(10_000)}, temporary)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert not os.listdir(tmp_path)


def test_an_error_that_names_another_file_keeps_that_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, replaced_atomically(tmp_path / "out.txt"):
        (tmp_path / "in.txt").read_text()
    assert caught.value.filename == str(tmp_path / "in.txt")


def test_a_folder_that_cannot_be_written_is_named_by_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/somewhere/.note-x.tmp.txt")

    monkeypatch.setattr("cdt_fast.files.tempfile.mkstemp", refuse)
    with pytest.raises(PermissionError) as caught:
        write_text(tmp_path / "note.txt", "")
    assert caught.value.filename == str(tmp_path / "note.txt")


def test_json_is_read_back_and_numbers_it_cannot_hold_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "values.json"
    write_json(path, {"a": [1.5, None, "γ"]})
    assert read_json(path) == {"a": [1.5, None, "γ"]}
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": [1.5, None, "γ"]}


@pytest.mark.parametrize("content", [b'{"a": 1', b"\xff\xfe", b""])
def test_a_json_file_that_is_not_whole_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "values.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_only_leftovers_are_removed(tmp_path: Path) -> None:
    for name in (".state-abc.tmp.safetensors", ".note-x.tmp", "state.safetensors", ".hidden"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".hidden", "state.safetensors"]
    remove_leftovers(tmp_path / "nowhere")
