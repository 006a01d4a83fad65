"""Downloads of data sets, from files in place of a server."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cdt_fast.checks import InputError
from cdt_fast.fetch import DATASETS, Dataset, fetch


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("clips/a", b"frames")


def tarred(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo("clips/a")
        member.size = 6
        archive.addfile(member, io.BytesIO(b"frames"))


def offer(monkeypatch: pytest.MonkeyPatch, archive: Path, sha256: str | None = None) -> None:
    """Offer an archive as the data set "avenue"."""
    digest = sha256 or hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setitem(DATASETS, "avenue", Dataset("A set", archive.as_uri(), digest, "is for tests"))


@pytest.mark.parametrize(("name", "write"), [("set.zip", zipped), ("set.tar.gz", tarred)])
def test_an_archive_is_unpacked_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    write: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / name)
    offer(monkeypatch, tmp_path / name)
    for said in ("is for tests", "already at"):
        assert fetch("avenue", tmp_path / "sets", progress=False) == tmp_path / "sets" / "avenue"
        assert said in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "sets").iterdir()] == ["avenue"]
    assert (tmp_path / "sets" / "avenue" / "clips" / "a").read_bytes() == b"frames"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(b"another file on the server"), "invalid hash value"),
        (Path.unlink, "No such file"),
    ],
)
def test_a_failed_download_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], message: str
) -> None:
    archive = tmp_path / "set.tar.gz"
    tarred(archive)
    offer(monkeypatch, archive)
    change(archive)
    with pytest.raises(InputError, match=message) as caught:
        fetch("avenue", tmp_path / "sets", progress=False)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "sets").iterdir())
    with pytest.raises(InputError, match="expected one of avenue, ucsd, shanghaitech"):
        fetch("nothing", tmp_path)
