"""Downloads from a server that fails in the ways that servers do, and archives that are not what they should be."""

from __future__ import annotations

import hashlib
import http.server
import io
import re
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdt_fast import fetch as module
from cdt_fast.checks import InputError
from cdt_fast.fetch import DATASETS, Dataset, fetch
from cdt_fast.files import try_lock


class Server(http.server.ThreadingHTTPServer):
    """Serves one file, with the faults that are asked for; keeps the range of each request."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.ranges = content, True
        self.drops: list[int] = []  # bytes after which a connection ends
        self.statuses: list[int] = []  # errors that come first
        self.requests: list[str | None] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore dropped connections: they are part of the tests."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        server, asked = self.server, self.headers.get("Range")
        server.requests.append(asked)
        if server.statuses:
            self.send_error(server.statuses.pop(0))
            return
        start = int(re.findall(r"bytes=(\d+)-", asked)[0]) if asked and server.ranges else 0
        if start >= len(server.content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(server.content) - start))
        self.end_headers()
        body = server.content[start:]
        self.wfile.write(body[: server.drops.pop(0)] if server.drops else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def zipped(**files: bytes) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "/"), content)
    return memory.getvalue()


def tarred(name: str, content: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size, member.type, member.linkname = len(content), kind, "/etc/passwd"
        archive.addfile(member, io.BytesIO(content))
    return memory.getvalue()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """Serve an archive as the data set "avenue"."""
    servers = []

    def start(content: bytes, sha256: str | None = None) -> Server:
        server = Server(content)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/set"
        known = Dataset("A set", address, sha256 or hashlib.sha256(content).hexdigest(), "is for tests")
        monkeypatch.setitem(DATASETS, "avenue", known)
        return server

    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.0)
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize("content", [zipped(clips__a=b"frames"), tarred("clips/a", b"frames")])
def test_an_archive_is_unpacked_once(
    serve: Callable[..., Server], tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(content)
    for _ in range(2):
        assert fetch("avenue", tmp_path, progress=False) == tmp_path / "avenue"
    assert (tmp_path / "avenue" / "clips" / "a").read_bytes() == b"frames"
    assert files_in(tmp_path) == {"avenue", "avenue/clips", "avenue/clips/a"}
    assert len(server.requests) == 1
    said = capsys.readouterr().err
    assert "is for tests" in said
    assert "already at" in said


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_was_cut_off(serve: Callable[..., Server], tmp_path: Path, ranges: bool) -> None:
    server = serve(zipped(a=bytes(range(256)) * 40))
    server.ranges, server.drops, server.statuses = ranges, [100, 60], [503]
    fetch("avenue", tmp_path, progress=False)
    assert server.requests == [None, None, "bytes=100-", "bytes=160-" if ranges else "bytes=60-"]


def test_what_another_call_has_left_is_used_and_a_changed_file_is_fetched_anew(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    server = serve(zipped(a=b"frames" * 100))
    (tmp_path / ".avenue.part").write_bytes(server.content[:50])
    fetch("avenue", tmp_path / ".", progress=False)
    assert server.requests == ["bytes=50-"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".avenue.part").write_bytes(b"of an older file on the server")
    fetch("avenue", tmp_path / "other", progress=False)
    assert server.requests[1:] == ["bytes=30-", None]


@pytest.mark.parametrize(
    ("content", "sha256", "statuses", "message"),
    [
        (b"anything", "0" * 64, [], "the download has sha256 "),
        (b"anything", None, [404], "the server refuses the download: 404"),
        (b"anything", None, [503] * 9, "the download stopped after 0 bytes"),
        (b"no archive", None, [], "the archive cannot be unpacked"),
        (tarred("../outside", b"x"), None, [], "the archive cannot be unpacked"),
        (zipped(a=bytes(200 << 20)), None, [], "more than"),
    ],
)
def test_what_cannot_be_had_is_one_line_and_leaves_no_folder(
    serve: Callable[..., Server], tmp_path: Path, content: bytes, sha256: str | None, statuses: list[int], message: str
) -> None:
    serve(content, sha256).statuses = statuses
    with pytest.raises(InputError, match=message) as caught:
        fetch("avenue", tmp_path / "sets", progress=False)
    assert "\n" not in str(caught.value)
    assert files_in(tmp_path) <= {"sets", "sets/.avenue.part"}


def test_links_in_an_archive_are_passed_over(serve: Callable[..., Server], tmp_path: Path) -> None:
    serve(tarred("link", b"", tarfile.SYMTYPE))
    with pytest.raises(InputError, match="expected one of avenue, ucsd, shanghaitech"):
        fetch("nothing", tmp_path)
    fetch("avenue", tmp_path, progress=False)
    assert files_in(tmp_path / "avenue") == set()


def test_another_process_at_the_same_place_is_said(serve: Callable[..., Server], tmp_path: Path) -> None:
    serve(zipped(a=b"x"))
    with (tmp_path / ".avenue.part").open("ab") as file:
        assert try_lock(file)
        with pytest.raises(InputError, match="another process fetches"):
            fetch("avenue", tmp_path, progress=False)
