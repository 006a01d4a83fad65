"""Download the public data sets of surveillance video that results are reported on."""

from __future__ import annotations

import fcntl
import os
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from cdt_fast.checksums import sha256_of
from cdt_fast.errors import InputError, printable
from cdt_fast.fetch.download import download_file
from cdt_fast.fetch.unpack import check_whole, unpack_archive
from cdt_fast.files import try_lock

_NO_LICENSE = "carries no license: it is for research use as granted by its authors; never redistribute it"


class Dataset(NamedTuple):
    """A data set that can be fetched; its name is that of the folder that it is unpacked to."""

    title: str
    url: str  # where its authors offer the archive
    sha256: str  # of the archive, in hexadecimal
    terms: str  # what its use is bound to, as the end of a sentence that begins with the title


DATASETS = {
    "avenue": Dataset(
        title="CUHK Avenue",
        url="http://www.cse.cuhk.edu.hk/leojia/projects/detectabnormal/Avenue_Dataset.zip",
        sha256="fc9cb8432a11ca79c18aa180c72524011411b69d3b0ff27c8816e41c0de61531",
        terms=_NO_LICENSE,
    ),
    "ucsd": Dataset(
        title="UCSD Anomaly Detection (Ped1 and Ped2)",
        url="http://www.svcl.ucsd.edu/projects/anomaly/UCSD_Anomaly_Dataset.tar.gz",
        sha256="2329af326951f5097fdd114c50e853957d3e569493a49d22fc082a9fd791915b",
        terms=_NO_LICENSE,
    ),
    "shanghaitech": Dataset(
        title="ShanghaiTech Campus",
        url="http://101.32.75.151:8181/dataset/shanghaitech.tar.gz",
        sha256="c13a827043b259ccf8493c9d9130486872992153a9d714fe229e523cd4c94116",
        terms="is offered by its authors for research; read their terms before any other use",
    ),
}


def fetch(
    name: str,
    folder: str | os.PathLike[str],
    *,
    url: str | None = None,
    sha256: str | None = None,
    keep_archive: bool = False,
    progress: bool = True,
) -> Path:
    """Download and unpack a data set, or say that it is there already.

    An interrupted download resumes where it stopped when it is called again. The unpacked folder appears only when it
    is whole, and is counted when it is found there later. While another process fetches the same data set to the same
    place, this one waits. Messages go to stderr.

    Args:
        name: a key of `DATASETS`.
        folder: where to put it; the data set becomes `<folder>/<name>`.
        url: another address of the archive, such as a mirror.
        sha256: the sum of another archive at `url`; by default the one published for the data set.
        keep_archive: keep the archive beside the unpacked folder.
        progress: show a bar on stderr.

    Returns:
        The unpacked folder, which `find_clips` and `load_video` take (of ucsd: one of its two subfolders).

    Raises:
        InputError: no such data set, the download fails, its sum is wrong, the archive cannot be unpacked, the disk is
            full, or files of the data set have gone since it was unpacked.
    """
    dataset = DATASETS.get(name)
    if dataset is None:
        raise InputError(f"{name}: no such data set; expected one of {', '.join(DATASETS)}")
    place = Path(folder) / name
    new = not place.exists()
    if new:
        _say(f"{dataset.title} {dataset.terms}")
    if new or os.access(place.parent, os.W_OK):  # what a process left that was killed after it had unpacked goes, too
        with _alone(place):
            new = not place.exists()  # else another process has fetched it, by now
            archive = place.parent / (Path(urllib.parse.urlsplit(url or dataset.url).path).name or f"{name}.archive")
            if new:
                _obtain(archive, url or dataset.url, sha256 or dataset.sha256, progress)
                unpack_archive(archive, place)
            if not keep_archive:
                archive.unlink(missing_ok=True)
    if new:
        _say(f"{name}: unpacked to {place}")
        return place
    check_whole(place)
    _say(f"{name}: already at {place}")
    return place


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Wait until no other process fetches to `place`, and let others wait until the block, or this process, ends."""
    path = place.with_name(f".{place.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(path)
    except OSError as error:
        raise InputError(f"{place.parent}: cannot be written ({error.strerror})") from error
    with lock:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path) -> IO[bytes]:
    """The file at `path`, open and locked; its lock is that of all who open the same file."""
    while True:
        file = path.open("ab")
        if not try_lock(file):
            _say(f"{path.parent}: another process fetches this data set; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # whoever held the lock has removed the file


def _obtain(archive: Path, url: str, sha256: str, progress: bool) -> None:
    if not archive.exists():
        download_file(url, archive, sha256, progress=progress)
        return
    try:
        actual = sha256_of(archive)
    except OSError as error:
        raise InputError(f"{archive}: cannot be read ({error.strerror})") from error
    if actual != sha256.lower():
        raise InputError(f"{archive}: has sha256 {actual}, expected {sha256.lower()}; move it away and fetch again")
    _say(f"{archive}: already downloaded")


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr)
