"""Wheel and sdist, each built, installed into an empty environment and tried as a stranger would: `make release-check`.

    python -m tests.release [--keep FOLDER]

The sdist is made of the files that git knows, the wheel of the unpacked sdist. In each environment: the import,
`cdt-fast --version` and `info`, a tiny training, its resumption, evaluation and report, denoising, and a saved model
loaded. Then the tests that the sdist holds are run from it: `--tests` of them, those of the ops among them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.environments import CONSTRAINTS, ROOT, Failed, install, make, pinned, run
from tests.tiny import scrolling_clip, tiny_arguments

# Small and of all kinds: the whole of `make test` is the business of CI.
TESTS = (
    *("tests/ops/test_unrolled_layer.py", "tests/ops/test_registration.py", "tests/constraints/test_descent.py"),
    *("tests/models/test_dust.py", "tests/test_package.py", "tests/test_docs.py"),
)


def built(folder: Path) -> dict[str, Path]:
    """The two files of a release, and the unpacked sdist under "source"."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "checkout" / name).write_bytes((ROOT / name).read_bytes())
    sdist = _build("sdist", folder / "checkout", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return {"wheel": _build("wheel", source, folder), "sdist": sdist, "source": source}


def _build(what: str, source: Path, folder: Path) -> Path:
    code = f"from setuptools import build_meta; print(build_meta.build_{what}({str(folder)!r}))"
    return folder / run([sys.executable, "-c", code], source).splitlines()[-1]


def tried(distribution: Path, folder: Path) -> str:
    """Install a distribution into an empty environment and use it; the environment's Python.

    Raises:
        Failed: a step does not do what it should.
    """
    python, place = make(folder / "venv"), folder / "empty"
    place.mkdir()
    install(python, f"torch=={pinned('torch')}")  # the exact version, for a range may bring gigabytes for GPUs
    install(python, "--constraint", str(CONSTRAINTS), f"{distribution}[video,report]")
    np.save(place / "clip.npy", scrolling_clip())
    command = str(folder / "venv" / "bin" / "cdt-fast")
    for words, expected in (
        (["--version"], "cdt-fast 0."),
        (["info"], "device"),
        (["train", "video", "clip.npy", *tiny_arguments(steps=6), "--out", "run"], "report: "),
        (["evaluate", "run"], "report: "),
        (["train", "video", "--resume", "run"], "report: "),
        (["denoise", "run", "clip.npy", "out.mp4"], ""),
    ):
        said = run([command, *words], place, OMP_NUM_THREADS="1")
        if expected not in said:
            raise Failed(f"cdt-fast {' '.join(words)} says {said[-300:]!r}")
    code = "import cdt_fast, cdt_fast.models as m; m.load_pretrained('run/model'); print(cdt_fast.__file__)"
    if str(folder) not in run([python, "-c", code], place):
        raise Failed("another cdt_fast was imported")
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="folder for the two files; none are kept where it is not given")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="what is run from the unpacked sdist")
    options = parser.parse_args()
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"release: {text} ({time.monotonic() - started:.0f} s)", flush=True)

    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        try:
            files = built(folder)
            for kind in ("wheel", "sdist"):
                say(f"{files[kind].name}: {files[kind].stat().st_size / 2**20:.2f} MiB")
                python = tried(files[kind], folder / kind)
                say(f"{kind}: installed into an empty environment, imported, trained, evaluated, denoised")
            source = files["source"]
            install(python, "--constraint", str(CONSTRAINTS), "setuptools")
            install(
                python, "--constraint", str(CONSTRAINTS), "--no-build-isolation", f"--editable={files['source']}[test]"
            )
            words = [python, "-m", "pytest", "--quiet", "--part=quick", *options.tests]
            say(run(words, source, OMP_NUM_THREADS="1").splitlines()[-1] + " from the unpacked sdist")
            if options.keep is not None:
                options.keep.mkdir(parents=True, exist_ok=True)
                for kind in ("wheel", "sdist"):
                    (options.keep / files[kind].name).write_bytes(files[kind].read_bytes())
        except Failed as failure:
            say(f"FAILED: {failure}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
