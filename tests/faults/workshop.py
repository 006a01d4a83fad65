"""What the trials need, made once: sources, runs that nothing has disturbed, an experiment and a server of archives."""

from __future__ import annotations

import hashlib
import http.server
import io
import os
import shutil
import signal
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import tomli_w

from cdt_fast import experiments
from cdt_fast.errors import InputError
from cdt_fast.fetch import DATASETS, Dataset
from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.training.run_folder import RunFolder
from tests.faults.jobs import Problem, succeed
from tests.tiny import TINY, scrolling_clip, tiny_arguments
from tests.tiny_text import TINY_LANGUAGE, TINY_TEXT, words_of_command, write_instructions, write_table
from tests.training.test_interruption import assert_same_runs

# Steps enough for kills to meet logs, validations and checkpoints, which share few steps.
STEPS: dict[str, Any] = {"steps": 24, "validate_every": 5, "checkpoint_every": 4, "log_every": 7}


class Workshop:
    """Everything lies in one folder, which goes when the campaign ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers = 0
        self.seconds: dict[str, float] = {}
        self.clip, self.video = folder / "clip.npy", folder / "clip.mp4"
        np.save(self.clip, scrolling_clip())
        with av.open(str(self.video), "w") as container:
            stream = container.add_stream("mpeg4", rate=25)
            stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
            for frame in scrolling_clip():
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="gray")))
            container.mux(stream.encode())
        self.table = write_table(folder / "reviews.tsv")
        instructions = write_instructions(folder / "alpaca.json")
        self.training = {
            "video": ["train", "video", str(self.video), *tiny_arguments(**STEPS)],
            "text": ["train", "text", str(self.table), *words_of_command(TINY_TEXT, **STEPS)],
            "lm": ["train", "lm", str(instructions), *words_of_command(TINY_LANGUAGE, **STEPS)],
        }
        self._make_experiment()
        self._serve()

    def place(self) -> Path:
        """A new, empty folder of a trial, whose decoded clips are its own."""
        self.numbers += 1
        place = self.folder / f"trial-{self.numbers}"
        place.mkdir()
        os.environ["CDT_FAST_CACHE"] = str(place / "cache")
        return place

    def whole(self, name: str, make: Callable[[Path], object]) -> Path:
        """The folder in which `make` has done its work undisturbed, and how long it took."""
        done = self.folder / f"whole-{name}"
        if not done.exists():
            done.mkdir()
            for place in (done, self.place()):  # the first one is slow
                os.environ["CDT_FAST_CACHE"] = str(place / "cache")
                started = time.monotonic()
                make(place)
                self.seconds[name] = time.monotonic() - started
        return done

    def whole_run(self, task: str) -> Path:
        words = self.training[task]
        done = self.whole(task, lambda done: succeed([*words, "--out", str(done / "run")], done / "log"))
        return done / "run"

    def copy_of_run(self, task: str, place: Path) -> Path:
        return shutil.copytree(self.whole_run(task), place / "run")

    def _make_experiment(self) -> None:
        content = {
            "title": "a tiny network",
            "source": "a clip",
            "task": "video",
            "seeds": [0],
            "shared": {**TINY, "training": {**TINY["training"], "steps": 9}},
            "runs": {"plain": {"constraints": {"constrained": False}}, "constrained": {"constraints": {"rate": 0.25}}},
        }
        experiments.FOLDER = self.folder / "experiments"
        experiments.FOLDER.mkdir()
        (experiments.FOLDER / "tiny.toml").write_text(tomli_w.dumps(content))

    def _serve(self) -> None:
        memory = io.BytesIO()
        numbers = np.random.default_rng(0)
        self.files = {f"Set/{number:03}.bin": numbers.bytes(20_000) for number in range(100)}
        with zipfile.ZipFile(memory, "w") as archive:
            for name, content in self.files.items():
                archive.writestr(name, content)
        content = memory.getvalue()
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(content))
        port = server.server_address[1]
        self.server = os.fork()
        if not self.server:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            server.serve_forever()
        server.server_close()
        sha256 = hashlib.sha256(content).hexdigest()
        DATASETS["set"] = Dataset("A set", f"http://127.0.0.1:{port}/set.zip", sha256, "is a test's own")

    def close(self) -> None:
        os.kill(self.server, signal.SIGKILL)
        os.waitpid(self.server, 0)


def _handler(content: bytes) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            try:
                for first in range(start, len(content), 65536):
                    self.wfile.write(content[first : first + 65536])
            except OSError:
                return  # whoever asked was killed

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def check_same_runs(run: Path, expected: Path) -> None:
    """Require that two runs are equal bit for bit, and that nothing temporary was left.

    Raises:
        Problem: they are not.
    """
    try:
        assert_same_runs(RunFolder(run), RunFolder(expected))
    except AssertionError as error:
        raise Problem(f"a resumed run differs: {str(error)[:300]}") from error


def check_saved(run: Path) -> None:
    """Require that what is there was saved whole, and no log of a step that no checkpoint can lead to again.

    Raises:
        Problem: it was not.
    """
    folder = RunFolder(run)
    try:
        if folder.checkpoint.exists():
            load_checkpoint(folder.checkpoint)
        folder.read_metrics()
    except InputError as error:
        raise Problem(f"what was saved is damaged: {error}") from error


def check_clean(*folders: Path) -> None:
    """Require that no temporary file lies in or below the folders."""
    left = [str(path) for folder in folders if folder.exists() for path in folder.rglob(".*")]
    if left:
        raise Problem(f"left behind: {', '.join(left[:3])}")
