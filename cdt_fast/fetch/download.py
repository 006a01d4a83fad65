"""Download one large file over HTTP: resumed after an interruption, checked by its sum."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from cdt_fast.checksums import sha256_of
from cdt_fast.errors import InputError, printable

MOST_BYTES = 100 << 30
"""More than any archive here has: a server that sends without end must not fill the disk."""

TIMEOUT_SECONDS = 60.0
ATTEMPTS_WITHOUT_PROGRESS = 5
FIRST_PAUSE_SECONDS = 1.0

_BLOCK_BYTES = 1 << 20
_TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})


class _Interrupted(Exception):
    """The connection failed in a way that another attempt may mend."""


def download_file(url: str, target: Path, sha256: str, *, progress: bool = True) -> None:
    """Download `url`, http or https, to `target`, a file to make in a folder that exists.

    The bytes gather in `<target>.part`, from where a later call resumes: it asks for the rest only. The part becomes
    `target` once its sum is right; where that of a resumed one is wrong, as the server's file is another one by now,
    the download begins anew. No other process may download to the same place.

    Raises:
        InputError: the server refuses, the connection keeps failing, the disk is full (the part is kept in all three
            cases), the file is larger than `MOST_BYTES`, or the sum is wrong (the part is removed).
    """
    if not url.lower().startswith(("http://", "https://")):
        raise InputError(f"{url}: expected an address that begins with http:// or https://")
    part = target.with_name(f"{target.name}.part")
    resumed = _size(part) > 0
    actual = _downloaded(url, part, progress)
    if resumed and actual != sha256.lower():
        part.unlink()
        actual = _downloaded(url, part, progress)
    if actual != sha256.lower():
        part.unlink()
        raise InputError(
            f"{url}: the download has sha256 {actual}, expected {sha256.lower()}; it was removed: the file on the "
            "server was altered or is another one"
        )
    part.replace(target)


def _downloaded(url: str, part: Path, progress: bool) -> str:
    """Download what is missing of a part; the sum of all of it."""
    furthest, failures = _size(part), 0
    with tqdm(desc=printable(part.stem), unit="B", unit_scale=True, disable=not progress) as bar:
        while True:
            try:
                _request_rest(url, part, bar)
                return sha256_of(part)
            except _Interrupted as error:
                failures = 0 if _size(part) > furthest else failures + 1
                furthest = max(furthest, _size(part))
                if failures == ATTEMPTS_WITHOUT_PROGRESS:
                    raise InputError(
                        f"{url}: the download stopped after {_size(part)} bytes ({error}); run it again to resume there"
                    ) from error
                time.sleep(FIRST_PAUSE_SECONDS * 2**failures)


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _opened(part: Path, start: int) -> BinaryIO:
    """The part, to be written from byte `start` on; what lies beyond it is cut off."""
    file = part.open("ab")
    file.truncate(start)
    return file


def _request_rest(url: str, part: Path, bar: tqdm) -> None:
    start = _size(part)
    headers = {"User-Agent": "cdt-fast", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
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
        raise _Interrupted(_reason(error)) from error
    except ValueError as error:
        raise InputError(f"{url}: is not an address that can be asked for ({error})") from error
    with response:
        _receive(response, part, bar, start)


def _receive(response: http.client.HTTPResponse, part: Path, bar: tqdm, start: int) -> None:
    if response.status != 206:
        # The server ignores ranges: this is the whole file.
        start = 0
    elif not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        part.unlink(missing_ok=True)  # the next attempt asks for all
        raise _Interrupted("the server answered with another range than asked")
    length = response.headers.get("Content-Length")
    total = start + int(length) if length and length.isdecimal() else None
    if (total or 0) > MOST_BYTES:
        raise _too_large(part)
    bar.reset(total)
    bar.update(start)
    try:
        with _opened(part, start) as file:
            for block in _blocks(response):
                if start + len(block) > MOST_BYTES:
                    raise _too_large(part)
                file.write(block)
                start += len(block)
                bar.update(len(block))
    except OSError as error:
        raise InputError(
            f"{part}: cannot be written after {_size(part)} bytes ({error.strerror}); free some room and run it "
            "again to resume there"
        ) from error
    if total is not None and _size(part) < total:
        raise _Interrupted(f"the connection ended {total - _size(part)} bytes early")


def _too_large(part: Path) -> InputError:
    part.unlink(missing_ok=True)
    return InputError(f"{part}: the file on the server is larger than {MOST_BYTES >> 30} GiB; it was removed")


def _blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        while block := response.read(_BLOCK_BYTES):
            yield block
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(_reason(error)) from error


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
