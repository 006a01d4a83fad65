"""What is installed: one top-level name, a light import, errors that name the missing extra, the public names."""

from __future__ import annotations

import inspect
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cdt_fast
from cdt_fast import models, ops

ROOT = Path(__file__).parent.parent
OPTIONAL = ("triton", "av", "PIL", "transformers", "trl", "lightning", "matplotlib", "tensorboard")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_only_top_level_name_of_the_wheel_is_cdt_fast(tmp_path: Path) -> None:
    for name in ("cdt_fast", "kernels", "models", "bench", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"cdt_fast"}
    files = (
        "kernels/__init__.py",
        "models/dust.py",
        "bench/run.py",
        "ops/unrolled_layer/operator.py",
        "experiments/video.toml",
    )
    for file in files:
        assert f"cdt_fast/{file}" in names


def test_import_needs_no_optional_package() -> None:
    block = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL!r}));"
    modules = "cdt_fast, cdt_fast.cli, cdt_fast.video.data, cdt_fast.training.loop, cdt_fast.training.report"
    result = python(f"{block} import {modules}")
    assert result.returncode == 0, result.stderr


def test_import_loads_nothing_heavy() -> None:
    # The seconds of an import depend on the machine; what it loads does not. These are what takes a second and more.
    heavy = (*OPTIONAL, "accelerate", "tqdm", "huggingface_hub", "scipy")
    result = python(
        "import torch, sys; before = set(sys.modules); import cdt_fast; loaded = set(sys.modules) - before; "
        f"print([name for name in {heavy!r} if name in loaded])"
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


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
    for name in cdt_fast.__all__:
        assert getattr(cdt_fast, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'DescentConstraint'"):
        cdt_fast.DescentConstraint  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue, reportUnusedExpression]


@pytest.mark.parametrize(
    ("blocked", "call", "extra"),
    [
        ("av", "from cdt_fast.video.data import open_source; open_source('x.mp4')", "cdt-fast[video]"),
        ("PIL", "from cdt_fast.video.data import open_source; list(open_source('frames').frames())", "cdt-fast[video]"),
        (
            "matplotlib",
            "from cdt_fast.training.figures import write_figures; write_figures('.', [])",
            "cdt-fast[report]",
        ),
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


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_public_names_and_arguments() -> None:
    assert parameters(ops.symmetric_attention) == ["z", "values", "scale", "lengths", "energy"]
    assert parameters(ops.soft_threshold) == ["x", "threshold"]
    assert parameters(ops.lista_step) == ["codes", "signal", "dictionary", "step", "threshold", "nonlinearity"]
    assert parameters(ops.unrolled_layer) == [
        *("codes", "signal", "dictionary", "step", "threshold", "scale"),
        *("nonlinearity", "projection", "lengths", "next_dictionary", "target"),
    ]
    assert parameters(ops.residual_linear) == ["x", "weight", "residual", "alpha", "nonlinearity", "threshold"]
    assert parameters(ops.layerwise_cross_entropy) == [
        *("hidden_states", "weight", "targets", "bias", "depth_weights", "ignore_index", "reduction"),
        *("label_smoothing", "softcap", "chunk_tokens", "inner_fraction", "generator"),
    ]
    assert parameters(ops.layerwise_reconstruction_loss)[:3] == ["reconstructions", "target", "depth_weights"]
    assert parameters(ops.use_backend) == ["backend"]
    assert parameters(models.DUST) == [
        *("patch_size", "code_size", "layers", "tied", "sparsity", "step", "scale"),
        *("nonlinearity", "initial_codes", "readout"),
    ]
    for name in ("reconstructions", "layer_losses", "save_pretrained", "from_pretrained"):
        assert callable(getattr(models.VideoUT, name))
    assert parameters(cdt_fast.DescentConstraints)[:3] == ["layers", "rate", "reference"]
    for name in ("weights", "record", "step", "epoch_end", "report", "state_dict", "load_state_dict", "preset"):
        assert callable(getattr(cdt_fast.DescentConstraints, name))
