from __future__ import annotations

import hashlib
import http.server
import io
import os
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdt_fast.errors import InputError
from cdt_fast.fetch import DATASETS, download, fetch, unpack
from cdt_fast.fetch.download import download_file
from cdt_fast.fetch.unpack import check_whole, unpack_archive


class Server(http.server.ThreadingHTTPServer):
    """Serves one file, with the faults that are asked for; keeps the range of each request."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.ranges = True
        self.shift = 0  # of the ranges that it answers with
        self.drops: list[int] = []
        self.statuses: list[int] = []
        self.requests: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/set.zip"

    def handle_error(self, request: object, client_address: object) -> None:
        """Dropped connections are part of the tests."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        server = self.server
        asked = self.headers.get("Range")
        server.requests.append(asked)
        if server.statuses:
            self.send_error(server.statuses.pop(0))
            return
        start = 0
        if asked and server.ranges:
            [number] = re.findall(r"bytes=(\d+)-", asked)
            start = int(number) + server.shift
            if start >= len(server.content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(server.content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(server.content) - 1}/{len(server.content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(server.content) - start))
        self.end_headers()
        body = server.content[start:]
        self.wfile.write(body[: server.drops.pop(0)] if server.drops else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def zipped(**files: bytes) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return memory.getvalue()


FILES = {"Set/readme.txt": b"hello", "Set/training_videos/01.avi": os.urandom(200_000)}
ARCHIVE = zipped(**FILES)
SUM = hashlib.sha256(ARCHIVE).hexdigest()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server(ARCHIVE)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(download, "FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "set.zip"


def get(server: Server, target: Path, sha256: str = SUM) -> None:
    download_file(server.url, target, sha256, progress=False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def interrupt(server: Server, target: Path, at: int) -> None:
    """Leave a part of `at` bytes, as an earlier call that was stopped would."""
    server.drops = [at] + [0] * 20
    with pytest.raises(InputError, match=f"stopped after {at} bytes"):
        get(server, target)
    server.drops = []
    server.requests.clear()


def test_a_download(server, target):
    get(server, target)
    assert target.read_bytes() == ARCHIVE
    assert names(target.parent) == ["set.zip"]
    assert server.requests == [None]


def test_a_dropped_connection_goes_on_where_it_stopped(server, target):
    server.drops = [50_000, 70_000]
    get(server, target)
    assert target.read_bytes() == ARCHIVE
    assert server.requests == [None, "bytes=50000-", "bytes=120000-"]


def test_a_later_call_goes_on_where_the_last_one_stopped(server, target):
    interrupt(server, target, 60_000)
    assert names(target.parent) == ["set.zip.part"]
    get(server, target)
    assert server.requests == ["bytes=60000-"]
    assert target.read_bytes() == ARCHIVE


@pytest.mark.parametrize("drops", [[], [80_000, 90_000]])
def test_a_server_that_ignores_ranges(server, target, drops):
    interrupt(server, target, 60_000)
    server.ranges = False
    server.drops = drops
    get(server, target)
    assert target.read_bytes() == ARCHIVE


def test_a_part_that_is_too_long_is_begun_anew(server, target):
    target.with_name("set.zip.part").write_bytes(ARCHIVE + b"more")
    get(server, target)
    assert target.read_bytes() == ARCHIVE
    assert server.requests[-1] is None


def test_a_wrong_sum_removes_the_part(server, target):
    with pytest.raises(InputError) as caught:
        get(server, target, "0" * 64)
    assert SUM in str(caught.value)
    assert "0" * 64 in str(caught.value)
    assert names(target.parent) == []


def test_retries_are_bounded(server, target):
    server.statuses = [503] * 99
    with pytest.raises(InputError, match=r"stopped after 0 bytes .*503"):
        get(server, target)
    assert len(server.requests) == download.ATTEMPTS_WITHOUT_PROGRESS


@pytest.mark.parametrize("status", [404, 403])
def test_a_refusal_is_not_retried(server, target, status):
    server.statuses = [status]
    with pytest.raises(InputError, match=f"{server.url}.*{status}"):
        get(server, target)
    assert len(server.requests) == 1


def test_fetch_unpacks_and_removes_the_archive(server, tmp_path, capsys):
    place = fetch("avenue", tmp_path / "data", url=server.url, sha256=SUM.upper(), progress=False)
    assert place == tmp_path / "data" / "avenue"
    assert {name: (place / name).read_bytes() for name in FILES} == FILES
    assert names(tmp_path / "data") == ["avenue"]
    said = capsys.readouterr()
    assert said.out == ""
    assert "no license" in said.err
    assert "research use" in said.err
    assert "never redistribute" in said.err
    assert fetch("avenue", tmp_path / "data", progress=False) == place
    assert f"already at {place}" in capsys.readouterr().err
    assert len(server.requests) == 1


def test_fetch_checks_the_published_sum_of_a_mirror(server, tmp_path):
    with pytest.raises(InputError, match=DATASETS["ucsd"].sha256):
        fetch("ucsd", tmp_path, url=server.url, progress=False)
    assert names(tmp_path) == []


def test_every_data_set_has_a_sum_and_terms():
    for dataset in DATASETS.values():
        assert re.fullmatch("[0-9a-f]{64}", dataset.sha256)
        assert dataset.url.startswith("http")
        assert dataset.terms


def tarred(path: Path, mode: str, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_tars_are_unpacked_without_their_links(tmp_path, mode):
    link, folder = tarfile.TarInfo("Set/link"), tarfile.TarInfo("Set/empty")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    folder.type = tarfile.DIRTYPE
    members = [
        (tarfile.TarInfo("./Set/a.txt"), b"a"),
        (link, b""),
        (folder, b""),
        (tarfile.TarInfo("Set/b/c.txt"), b"c"),
    ]
    unpack_archive(tarred(tmp_path / "set.tar", mode, *members), tmp_path / "out")
    unpacked = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*"))
    assert unpacked == [".fetched.json", "Set", "Set/a.txt", "Set/b", "Set/b/c.txt", "Set/empty"]
    assert (tmp_path / "out" / "Set" / "b" / "c.txt").read_bytes() == b"c"


@pytest.mark.parametrize("name", ["../escaped.txt", "Set/../../escaped.txt", "/tmp/escaped.txt", "..\\escaped.txt"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_entries_outside_the_folder_are_refused(tmp_path, name, kind):
    path = tmp_path / f"set.{kind}"
    if kind == "zip":
        path.write_bytes(zipped(**{"Set/a.txt": b"a", name: b"bad"}))
    else:
        tarred(path, "w:gz", (tarfile.TarInfo("Set/a.txt"), b"a"), (tarfile.TarInfo(name), b"bad"))
    with pytest.raises(InputError, match="outside the folder") as caught:
        unpack_archive(path, tmp_path / "out")
    assert str(path) in str(caught.value)
    assert names(tmp_path) == [path.name]


def test_damaged_archives_leave_nothing_behind(tmp_path):
    whole = tarred(tmp_path / "set.tar.gz", "w:gz", *((tarfile.TarInfo(f"{n}"), os.urandom(5000)) for n in range(20)))
    whole.write_bytes(whole.read_bytes()[:60_000])
    damaged = bytearray(ARCHIVE)
    damaged[100_000] ^= 1
    (tmp_path / "set.zip").write_bytes(damaged)
    (tmp_path / "set.txt").write_bytes(b"no archive")
    for name in ("set.tar.gz", "set.zip", "set.txt"):
        with pytest.raises(InputError, match=re.escape(name)):
            unpack_archive(tmp_path / name, tmp_path / "out")
    assert names(tmp_path) == ["set.tar.gz", "set.txt", "set.zip"]


def test_a_data_set_that_has_lost_files_is_not_called_whole(server, tmp_path):
    place = fetch("avenue", tmp_path, url=server.url, sha256=SUM, progress=False)
    (place / "notes.txt").write_text("mine")
    assert fetch("avenue", tmp_path) == place
    lost = place / "Set" / "readme.txt"
    lost.write_bytes(b"")
    with pytest.raises(InputError, match=r"avenue: is not whole: it holds 3 of 2 files, 200,004 of 200,005 bytes"):
        fetch("avenue", tmp_path)
    lost.unlink()
    (place / "notes.txt").unlink()
    with pytest.raises(InputError, match=r"holds 1 of 2 files, .*remove the folder and fetch again"):
        fetch("avenue", tmp_path)
    (tmp_path / "made by hand").mkdir()
    check_whole(tmp_path / "made by hand")


_FETCH = """
import sys
from cdt_fast.fetch import fetch
sys.stdin.readline()
fetch("ucsd", sys.argv[1], url=sys.argv[2], sha256=sys.argv[3], progress=False)
"""


def test_two_fetches_at_once_leave_one_whole_data_set(server, tmp_path):
    """The second waits for the first, and neither downloads nor unpacks on its own."""
    files = {f"Train/Train{number:03}/{number}.tif": bytes([number % 251]) * 50 for number in range(1500)}
    server.content = zipped(**files)
    command = [sys.executable, "-c", _FETCH, str(tmp_path), server.url, hashlib.sha256(server.content).hexdigest()]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    assert len(server.requests) == 1
    assert names(tmp_path) == ["ucsd"]
    place = tmp_path / "ucsd"
    assert {path.relative_to(place).as_posix() for path in place.rglob("*.tif")} == set(files)
    check_whole(place)


@pytest.mark.parametrize("mode", ["zip", "w:gz", "w:xz", "w:bz2"])
def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(unpack, "_LEAST_BOUND", 1 << 20)
    path = tmp_path / "set"
    if mode == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("zeros", bytes(3 << 20))
    else:
        tarred(path, mode, (tarfile.TarInfo("zeros"), bytes(3 << 20)))
    assert path.stat().st_size < 20_000
    with pytest.raises(InputError, match="holds more than 1 MiB; nothing was unpacked"):
        unpack_archive(path, tmp_path / "out")
    assert names(tmp_path) == ["set"]


def test_an_archive_of_endless_entries_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "MOST_ENTRIES", 10)
    path = tarred(tmp_path / "set.tar", "w", *((tarfile.TarInfo(f"{number}"), b"") for number in range(11)))
    with pytest.raises(InputError, match="more than 10 entries"):
        unpack_archive(path, tmp_path / "out")
    assert names(tmp_path) == ["set.tar"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_file_that_is_too_large_is_not_downloaded(server, target, monkeypatch, announced):
    monkeypatch.setattr(download, "MOST_BYTES", 100_000)
    if not announced:
        monkeypatch.setattr(Handler, "send_header", lambda self, name, value: None)
    with pytest.raises(InputError, match="is larger than"):
        get(server, target)
    assert names(target.parent) == []


def test_what_a_killed_fetch_left_goes_with_the_next(server: Server, tmp_path: Path) -> None:
    """Killed after it had unpacked: the archive and the file that it had locked are there still."""
    settings = {"url": server.url, "sha256": SUM, "progress": False}
    place = fetch("ucsd", tmp_path, **settings)
    for name in ("set.zip", ".ucsd.lock"):
        (tmp_path / name).touch()
    assert fetch("ucsd", tmp_path, **settings) == place
    assert list(tmp_path.iterdir()) == [place]
