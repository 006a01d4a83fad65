"""Other versions of Python and of what the package stands on, a combination at a time: `make compatibility`.

    python -m tests.compatibility [NAME ...] [--out build/compatibility.md]

Each combination has an environment of its own, in which the representative tests run from an unpacked sdist. What a row
does not name is of the versions in constraints.txt. On a machine without a GPU torch is taken in its builds for
processors alone: the others bring gigabytes. What cannot be had stands in the table too, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cdt_fast.tables import as_markdown
from tests.environments import CONSTRAINTS, ROOT, Failed, install, make, pinned, run
from tests.release import built

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
CORE = (
    *("tests/ops/test_soft_threshold.py", "tests/ops/test_registration.py", "tests/ops/test_derivatives.py"),
    *("tests/ops/test_residual_linear.py", "tests/constraints/test_descent.py", "tests/training/test_step.py"),
    "tests/training/test_checkpoint.py",
)
VIDEO = ("tests/video/test_denoising.py", "tests/test_cli.py")
MODELS = ("tests/models/test_first_forward.py", "tests/models/test_transformers_weights.py")
TEXTS = ("tests/integrations/test_trainer.py", "tests/sequence/test_training_lm.py")
INTERPRETED = (("TRITON_INTERPRET", "1"),)
# Decoding with an exit needs a newer one, and says so; the other is refused with another reason.
OF_OLD_TRANSFORMERS = ("-k", "not decod and not no_cross_entropy")
KERNELS = ("tests/kernels/test_unrolled_layer_op.py", "tests/kernels/test_layerwise_reconstruction_loss.py")
WITHOUT_TORCH = ("tests/test_files.py", "tests/test_checksums.py")
TESTERS = ("pytest", "pytest-xdist", "pytest-benchmark", "hypothesis", "psutil", "shtab")


class NotToBeHad(Exception):
    """Why a combination cannot be tried here."""


@dataclass(frozen=True)
class Combination:
    """What differs from the pinned versions, and the tests for it.

    Attributes:
        name: of the row.
        prepare: makes the environment in a folder from the sources; its Python.
        tests: files and folders.
        variables: of the environment that the tests run in.
    """

    name: str
    prepare: Callable[[Path, Path], str]
    tests: Sequence[str]
    variables: tuple[tuple[str, str], ...] = ()


def lower_bounds(*extras: str) -> list[str]:
    """The oldest versions that pyproject.toml accepts of the dependencies and of some extras, but for torch's."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (dependencies,) = re.findall(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    for extra in extras:
        dependencies += re.findall(rf"^{extra} = \[(.*)\]", text, re.MULTILINE)[0]
    bounds = re.findall(r"\"([\w-]+)>=([\d.]+)", dependencies)
    return [f"{name}=={version}" for name, version in bounds if name not in ("torch", "triton", "tomli")]


def above(*packages: str, without: str = "") -> Callable[[Path, Path], str]:
    """This environment with some packages of other versions above it, and one hidden."""

    def prepare(folder: Path, source: Path) -> str:
        python = make(folder, above=True)
        install(python, f"setuptools=={pinned('setuptools')}")  # that of a new environment is an old one
        if packages:
            install(python, "--upgrade", *packages)
        if without:
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "hidden.pth").write_text(f"import sys; sys.modules[{without!r}] = None\n")
        install(python, "--no-deps", "--no-build-isolation", f"--editable={source}")
        return python

    return prepare


def whole(*packages: str, python: str = "", torch: str = "", newest: bool = False) -> Callable[[Path, Path], str]:
    """An environment of its own."""

    def prepare(folder: Path, source: Path) -> str:
        found = interpreter(python) if python else sys.executable
        check_torch(found, version := torch or pinned("torch"))
        made = make(folder, python=found)
        install(made, f"torch=={version}")
        bound = [] if newest or packages else ["--constraint", str(CONSTRAINTS)]
        install(made, *bound, "setuptools", *TESTERS, *packages)
        install(made, *bound, "--no-build-isolation", f"--editable={source}[video,report]")
        return made

    return prepare


def without_torch(python: str) -> Callable[[Path, Path], str]:
    """All but torch and what needs it: enough for files, settings and the command line's help."""

    def prepare(folder: Path, source: Path) -> str:
        made = make(folder, python=interpreter(python))
        names = ("numpy", "safetensors", "pydantic", "tomli-w", "tomli", "tqdm", "huggingface_hub", "setuptools")
        install(made, "--constraint", str(CONSTRAINTS), *names, *TESTERS)
        install(made, "--no-deps", "--no-build-isolation", f"--editable={source}")
        for folder_of in ("cdt_fast", "kernels", "models", "bench", "tests"):
            run([made, "-m", "compileall", "-q", str(source / folder_of)])
        for words in (["--help"], ["train", "video", "--help"], ["train", "lm", "--help"], ["evaluate", "--help"]):
            run([made, "-m", "cdt_fast", *words])
        return made

    return prepare


def interpreter(version: str) -> str:
    """A Python of this version that runs: on the PATH, or of pyenv.

    Raises:
        NotToBeHad: there is none.
    """
    pyenv = sorted(glob.glob(f"{os.environ.get('PYENV_ROOT', Path.home() / '.pyenv')}/versions/{version}.*/bin/python"))
    for found in (shutil.which(f"python{version}"), *pyenv):
        with contextlib.suppress(Failed):  # of pyenv a command may be there whose version is switched off
            if found is not None and run([found, "--version"]):
                return found
    raise NotToBeHad(f"no Python {version} on this machine")


def check_torch(python: str, version: str) -> None:
    """Require that the package index has a build of torch for processors alone, for this Python.

    Raises:
        NotToBeHad: it has not.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return  # elsewhere there are no others
    try:
        listed = run([python, "-m", "pip", "index", "versions", "torch"])
    except Failed as failure:
        raise NotToBeHad(f"the package index does not answer ({str(failure)[-80:]})") from failure
    if f"{version}+cpu" not in listed:
        raise NotToBeHad(f"of torch {version} the package index has no build for processors alone for this Python")


COMBINATIONS = (
    Combination("all dependencies at their lower bounds", whole(*lower_bounds("video", "report")), (*CORE, *VIDEO)),
    Combination("all dependencies at their newest", whole(newest=True), (*CORE, *VIDEO)),
    Combination("oldest torch (2.8.0)", whole(torch="2.8.0"), CORE),
    Combination("newest torch (2.15.0)", whole(torch="2.15.0"), CORE),
    Combination("oldest transformers (4.57.6)", whole("transformers==4.57.6"), (*MODELS, *TEXTS, *OF_OLD_TRANSFORMERS)),
    Combination("newest transformers", above("transformers"), (*MODELS, *TEXTS)),
    *(
        Combination(f"Triton {version}", above(f"triton=={version}", "numpy<2.4"), KERNELS, INTERPRETED)
        for version in ("3.4.0", "3.6.0")  # whose interpreters need that NumPy
    ),
    Combination("newest Triton", above("triton"), KERNELS, INTERPRETED),
    Combination("no Triton", above(without="triton"), (*CORE, "tests/test_info.py")),
    *(Combination(f"Python {version}", whole(python=version), (*CORE, *VIDEO)) for version in PYTHONS),
    *(
        Combination(f"Python {version}, without torch", without_torch(version), ("--noconftest", *WITHOUT_TORCH))
        for version in PYTHONS
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", help="combinations whose names hold one of these words; all if none is given"
    )
    parser.add_argument("--out", type=Path, help="file for the table, Markdown")
    options = parser.parse_args()
    rows, failed = [["combination", "Python", "torch", "Triton", "transformers", "found"]], False
    with tempfile.TemporaryDirectory(prefix="compatibility-") as place:
        source = built(Path(place))["source"]
        for number, one in enumerate(COMBINATIONS):
            if options.names and not any(name in one.name for name in options.names):
                continue
            folder = Path(place) / str(number)
            versions = [""] * 4
            try:
                python = one.prepare(folder, source)
                versions = _versions(python)
                words = [python, "-m", "pytest", "--quiet", *one.tests]
                words += [] if "--noconftest" in one.tests else ["--part=quick", "--numprocesses=auto"]
                found = run(words, source, OMP_NUM_THREADS="1", **dict(one.variables)).splitlines()[-1]
                if " passed" not in found:
                    raise Failed(f"nothing was tried: {found}")
            except NotToBeHad as reason:
                found = f"not tried: {reason}"
            except Failed as failure:
                failing = re.findall(r"(?:FAILED|ERROR) (\S+)", str(failure))
                found, failed = f"FAILED: {', '.join(failing[:5])} {str(failure)[-200:]}", True
            shutil.rmtree(folder, ignore_errors=True)
            rows.append([one.name, *versions, " ".join(found.split())])
            print(" | ".join(rows[-1]), flush=True)
    table = as_markdown(rows)
    print(f"\n{table}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(table + "\n", encoding="utf-8")
    return int(failed)


def _versions(python: str) -> list[str]:
    code = """
import importlib.metadata as m, importlib.util as u, platform
has = u.find_spec
print(platform.python_version(), *(m.version(n) if has(n) else "none" for n in ("torch", "triton", "transformers")))
"""
    return run([python, "-c", code]).split()


if __name__ == "__main__":
    sys.exit(main())
