"""Files of strangers run no code: pickles that would leave a trace are planted wherever a file is read."""

from __future__ import annotations

import ast
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cdt_fast.checks import InputError
from cdt_fast.models import load_pretrained
from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.video.data import open_source

ROOT = Path(__file__).parent.parent


class Planted:
    """Whoever loads a pickle of it makes a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    """The fixture's own pickle works: it leaves its trace, which is removed again."""
    made = Planted(tmp_path / "trace")
    pickle.loads(pickle.dumps(made))
    made.trace.rmdir()
    return made


def write_array(path: Path, made: Planted) -> None:
    np.save(path, np.array([made] * 4, dtype=object), allow_pickle=True)


def write_pickle(path: Path, made: Planted) -> None:
    path.write_bytes(pickle.dumps(made))


def write_torch(path: Path, made: Planted) -> None:
    torch.save({"step": made}, path)


def write_model(path: Path, made: Planted) -> None:
    path.mkdir()
    (path / "config.json").write_text('{"model": "DUST", "patch_size": 4, "code_size": 4, "layers": 1}')
    for name in ("model.safetensors", "pytorch_model.bin"):
        torch.save({"dictionary": made}, path / name)


def read_frames(path: Path) -> None:
    list(open_source(path).frames())


@pytest.mark.parametrize(
    ("name", "write", "read"),
    [
        ("clip.npy", write_array, read_frames),
        ("clip.npy", write_pickle, read_frames),
        ("clip.mp4", write_pickle, read_frames),
        ("state.safetensors", write_torch, load_checkpoint),
        ("state.safetensors", write_pickle, load_checkpoint),
        ("model", write_model, load_pretrained),
    ],
)
def test_a_planted_pickle_is_refused_and_does_nothing(
    tmp_path: Path, planted: Planted, name: str, write: Any, read: Any
) -> None:
    write(tmp_path / name, planted)
    with pytest.raises(InputError, match=re.escape(name)) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert not planted.trace.exists()


def test_no_source_loads_pickles_or_evaluates_words() -> None:
    for folder in ("cdt_fast", "models"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    options = {ast.unparse(keyword) for keyword in node.keywords}
                    assert called not in ("eval", "exec", "torch.load"), f"{path}:{node.lineno}"
                    assert not options & {"allow_pickle=True", "shell=True"}, f"{path}:{node.lineno}"
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    assert "pickle" not in ast.unparse(node), f"{path}:{node.lineno}"
