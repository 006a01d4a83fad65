"""Checksums beside the files that other tools write."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cdt_fast.checks import InputError
from cdt_fast.checksums import CHECKSUMS, check_folder, checksums_of, written_with_checksums


def test_the_sums_are_those_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"word" * 10**6)
    found = subprocess.run(["sha256sum", str(tmp_path / "a")], capture_output=True, text=True, check=True)
    assert checksums_of(tmp_path, ["a"]) == {"a": [found.stdout.split()[0]]}


def test_what_a_block_writes_is_summed_and_what_was_there_is_not(tmp_path: Path) -> None:
    for name in ("log", "weights"):
        (tmp_path / name).write_text("before")
    with written_with_checksums(tmp_path):
        (tmp_path / "weights").write_text("after!")
        (tmp_path / "config").write_text("new")
    check_folder(tmp_path)
    (tmp_path / "log").write_text("grows")
    check_folder(tmp_path)
    for name in ("weights", "config"):
        content = (tmp_path / name).read_text()
        (tmp_path / name).write_text(content.upper())
        with pytest.raises(InputError, match=rf"1 of its files are not what was written, the first is {name} .*remove"):
            check_folder(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(InputError, match=f"the first is {name}"):
            check_folder(tmp_path)
        (tmp_path / name).write_text(content)
    check_folder(tmp_path)


@pytest.mark.parametrize("sums", ["", "[]", '{"a": "word"}', '{"../a": ["word"]}', '{"": []}', '{"\\u0000": ["word"]}'])
def test_sums_that_are_none(sums: str, tmp_path: Path) -> None:
    (tmp_path / CHECKSUMS).write_text(sums)
    with pytest.raises(InputError):
        check_folder(tmp_path)
