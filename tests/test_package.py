"""What is installed: one top-level name, a light import, errors that name the missing extra, the public names."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import cdt_fast

ROOT = Path(__file__).parent.parent
OPTIONAL = ("triton", "av", "PIL", "transformers", "accelerate", "trl", "lightning", "matplotlib")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def build(what: str, folder: Path) -> Path:
    """The one file that setuptools makes of the sources in `folder`: "sdist" or "wheel"."""
    code = f"from setuptools import build_meta; build_meta.build_{what}('dist')"
    (folder / "dist").mkdir()
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
    (built,) = (folder / "dist").iterdir()
    return built


def python_files(folder: str) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}


@pytest.mark.slow
def test_the_sdist_is_the_repository_and_builds_the_wheel(tmp_path: Path) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("the list of the repository's files needs a git checkout")
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    checkout, unpacked = tmp_path / "checkout", tmp_path / "unpacked"
    for name in tracked:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes((ROOT / name).read_bytes())
    for name in ("kernels", "models", "bench"):
        (checkout / "cdt_fast" / name).symlink_to(f"../{name}")

    with tarfile.open(build("sdist", checkout)) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    assert tracked - {path.relative_to(source).as_posix() for path in source.rglob("*")} == set()

    wheel = zipfile.ZipFile(build("wheel", source))
    names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"cdt_fast"}
    expected = python_files("cdt_fast")
    for folder in ("kernels", "models", "bench"):
        expected |= {f"cdt_fast/{name}" for name in python_files(folder) if not name.startswith("bench/tools/")}
    assert {name for name in names if name.endswith(".py")} == expected
    # Type checkers believe the annotations of a package that has the marker.
    assert {
        "cdt_fast/py.typed",
        "cdt_fast/experiments/video.toml",
        "cdt_fast/video/denoiser/model.safetensors",
    } <= names
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    assert "Project-URL: Paper, https://arxiv.org/abs/2601.17257" in wheel.read(metadata).decode()

    wheel.extractall(tmp_path / "installed")
    code = "import cdt_fast; from cdt_fast.models import DUST; print(cdt_fast.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.startswith(str(tmp_path / "installed")), result.stderr


def test_import_needs_no_optional_package() -> None:
    block = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL!r}));"
    modules = "cdt_fast, cdt_fast.cli, cdt_fast.video.data, cdt_fast.training.loop, cdt_fast.training.report"
    result = python(f"{block} import {modules}")
    assert result.returncode == 0, result.stderr


def test_models_load_nothing_heavy() -> None:
    # The seconds of an import depend on the machine; what it loads does not. These are what takes a second and more.
    heavy = {*OPTIONAL, "tqdm", "huggingface_hub", "scipy", "torch._dynamo"}
    result = python(
        "import torch, sys; before = {*sys.modules}; import cdt_fast.models; "
        f"print({heavy!r} & sys.modules.keys() - before)"
    )
    assert result.stdout.strip() == "set()", result.stdout + result.stderr


def test_the_help_of_the_command_line_does_not_wait_for_torch() -> None:
    for words in (["--help"], ["train", "text", "--help"], ["bench", "--help"], ["train", "video", "--steps", "ten"]):
        result = python(
            "import atexit, sys; from cdt_fast import cli; "
            "atexit.register(lambda: print('torch' in sys.modules)); "
            f"sys.exit(cli.main({words!r}))"
        )
        assert result.stdout.splitlines()[-1] == "False", words


def test_public_names_come_when_they_are_asked_for() -> None:
    assert set(cdt_fast.__all__) <= set(dir(cdt_fast))
    assert {"with_descent", "DescentCallback", "perturbed"} <= set(cdt_fast.__all__)
    for name in cdt_fast.__all__:
        assert getattr(cdt_fast, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'DescentConstraint'"):
        cdt_fast.DescentConstraint  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue, reportUnusedExpression]


def test_a_package_that_is_there_and_fails_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import what_it_needs_is_not_there")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from cdt_fast.checks import require; "
    for name, state in (("broken", "cannot be imported (No module named 'what"), ("absent", "is not installed")):
        result = python(code + f"require({name!r}, 'video', 'reading')")
        assert f"reading needs the package '{name}', which {state}" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("blocked", "call", "extra"),
    [
        ("av", "from cdt_fast.video.data import open_source; open_source('x.mp4')", "cdt-fast[video]"),
        ("PIL", "from cdt_fast.video.data import open_source; list(open_source('frames').frames())", "cdt-fast[video]"),
        ("transformers", "from cdt_fast import with_descent; with_descent(object)", "cdt-fast[transformers]"),
        ("lightning.pytorch", "from cdt_fast import DescentCallback; DescentCallback({})", "cdt-fast[lightning]"),
        ("matplotlib", "from cdt_fast.training.report import pyplot; pyplot()", "cdt-fast[report]"),
    ],
)
def test_a_missing_extra_is_named(blocked: str, call: str, extra: str, tmp_path: Path) -> None:
    (tmp_path / "x.mp4").write_bytes(b"\0" * 64)
    (tmp_path / "frames").mkdir()
    for number in range(2):
        (tmp_path / "frames" / f"{number}.png").write_bytes(b"\0" * 64)
    code = f"import os, sys; os.chdir({str(tmp_path)!r}); sys.modules[{blocked!r}] = None; {call}"
    result = python(code)
    assert "MissingExtra" in result.stderr
    assert extra in result.stderr.splitlines()[-1]
