"""Download the public data sets of surveillance video that results are reported on."""

from __future__ import annotations

import http.client
import os
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from cdt_fast.checks import InputError, printable
from cdt_fast.checksums import sha256_of
from cdt_fast.files import try_lock

ATTEMPTS_WITHOUT_PROGRESS = 5
FIRST_PAUSE_SECONDS = 1.0
TIMEOUT_SECONDS = 60.0
MAX_GROWTH = 20  # how many times as large as its archive a data set may be; pictures and videos shrink to a third
_BLOCK_BYTES = 1 << 20
_TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
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


class _Interrupted(Exception):
    """The connection failed in a way that another attempt may mend."""


def fetch(name: str, folder: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """Download and unpack a data set to `<folder>/<name>`, or say that it is there already.

    An interrupted download resumes where it stopped when it is called again. The folder appears only when it is whole.

    Args:
        name: a key of `DATASETS`.
        folder: where to put it.
        progress: show a bar on stderr.

    Returns:
        The unpacked folder, which `train video` takes (of ucsd: one of its two subfolders).

    Raises:
        InputError: no such data set, the download fails, its sum is wrong, the archive cannot be unpacked, the disk is
            full, or another process fetches to the same place.
    """
    dataset = DATASETS.get(name)
    if dataset is None:
        raise InputError(f"{name}: no such data set; expected one of {', '.join(DATASETS)}")
    place = Path(folder) / name
    if place.exists():
        _say(f"{name}: already at {place}")
        return place
    _say(f"{dataset.title} {dataset.terms}")
    part = place.with_name(f".{name}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as lock:
            if not try_lock(lock):
                raise InputError(f"{place}: another process fetches this data set")
            _download(dataset, part, progress)
            _unpack(part, place, dataset.url)
            part.unlink()
    except OSError as error:
        raise InputError(
            f"{error.filename or place}: cannot be written ({error.strerror or error}); run it again to resume"
        ) from error
    _say(f"{name}: unpacked to {place}")
    return place


def _download(dataset: Dataset, part: Path, progress: bool) -> None:
    """Add what is missing of the archive to `part`, and check its sum."""
    resumed, furthest, failures = part.stat().st_size > 0, 0, 0
    with tqdm(desc=printable(dataset.title), unit="B", unit_scale=True, disable=not progress) as bar:
        while True:
            try:
                _request_rest(dataset.url, part, bar)
            except _Interrupted as error:
                failures = 0 if part.stat().st_size > furthest else failures + 1
                furthest = max(furthest, part.stat().st_size)
                if failures == ATTEMPTS_WITHOUT_PROGRESS:
                    raise InputError(
                        f"{dataset.url}: the download stopped after {furthest} bytes ({error}); run it again to resume"
                    ) from error
                time.sleep(FIRST_PAUSE_SECONDS * 2**failures)
                continue
            actual = sha256_of(part)
            if actual == dataset.sha256:
                return
            os.truncate(part, 0)
            if not resumed:
                raise InputError(
                    f"{dataset.url}: the download has sha256 {actual}, expected {dataset.sha256}; it was removed: the "
                    "file on the server is another one"
                )
            resumed = False  # the server's file may have changed since: once more from the start


def _request_rest(url: str, part: Path, bar: tqdm) -> None:
    start = part.stat().st_size
    headers = {"User-Agent": "cdt-fast", "Accept-Encoding": "identity"} | (
        {"Range": f"bytes={start}-"} if start else {}
    )
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # nothing lies beyond the part: its sum says whether it is the file
                return
            if error.code in _TRANSIENT_STATUSES:
                raise _Interrupted(f"the server answered {error.code} {error.reason}") from error
            raise InputError(f"{url}: the server refuses the download: {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(str(getattr(error, "reason", None) or error) or type(error).__name__) from error
    with response, part.open("ab") as file:
        if response.status != 206:  # the server ignores ranges: this is the whole file
            start = 0
            file.truncate(0)
        length = response.headers.get("Content-Length") or ""
        total = start + int(length) if length.isdecimal() else None
        bar.reset(total)
        bar.update(start)
        while block := _read(response):
            file.write(block)
            bar.update(len(block))
    if total is not None and part.stat().st_size < total:
        raise _Interrupted(f"the connection ended {total - part.stat().st_size} bytes early")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_BLOCK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(str(error) or type(error).__name__) from error


def _unpack(archive: Path, place: Path, url: str) -> None:
    """Unpack a .zip or a .tar to `place`; nothing is written elsewhere, and nothing is left of one that is damaged."""
    temporary = place.with_name(f".{place.name}.unpacking")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    most = MAX_GROWTH * archive.stat().st_size + (64 << 20)
    try:
        if tarfile.is_tarfile(archive):
            with tarfile.open(archive) as opened:
                members = [member for member in opened if member.isdir() or member.isfile()]
                _check_size(sum(member.size for member in members), most, url)
                opened.extractall(temporary, members, filter="data")
        else:
            with zipfile.ZipFile(archive) as opened:
                _check_size(sum(entry.file_size for entry in opened.infolist()), most, url)
                opened.extractall(temporary)  # which drops what would lead out of the folder
        temporary.rename(place)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, RuntimeError) as error:
        raise InputError(f"{url}: the archive cannot be unpacked ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_size(size: int, most: int, url: str) -> None:
    if size > most:
        raise InputError(f"{url}: the archive holds {size >> 20} MiB, more than {most >> 20}; nothing was unpacked")


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr)
