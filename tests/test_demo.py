"""`cdt-fast demo`, with a small scene, a few steps of training and toy sizes of the timed step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cdt_fast import demo
from tests.runs import Call
from tests.tiny import scrolling_clip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = demo.step.cases
    monkeypatch.setattr(demo.step, "cases", lambda device, size: cases(device, "toy"))
    for name, value in {"_FRAMES": 16, "_SIDE": 48, "_STEPS": 2}.items():
        monkeypatch.setattr(demo, name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_demo_is_one_page_and_can_be_called_again(call: Call, tmp_path: Path) -> None:
    answer = call("demo", "--out", tmp_path / "demo")
    assert answer.status == 0, answer
    assert answer.out.splitlines()[-1] == f"page: {tmp_path / 'demo' / 'demo.html'}"
    text = (tmp_path / "demo" / "demo.html").read_text()
    assert text.count("data:image/png;base64,") == 3
    for words in ("ffmpeg, nlmeans", "cdt_fast, noise estimated", "plain", "constrained", "eager, float32"):
        assert f"<td>{words}</td>" in text
        assert f"\n{words} " in answer.out
    assert answer.out.count("\neager, ") == 1  # on a CPU
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {
        *("demo.html", "noisy.mp4", "denoised.mp4", "plain-0", "constrained-0")
    }
    np.save(tmp_path / "clip.npy", scrolling_clip(20, 48, 64))
    again = call("demo", tmp_path / "clip.npy", "--out", tmp_path / "demo")
    assert again.status == 0, again
    assert f"Denoising {tmp_path / 'clip.npy'}" in (tmp_path / "demo" / "demo.html").read_text()


def test_files_of_others_are_left_alone(call: Call, tmp_path: Path) -> None:
    (tmp_path / "noisy.mp4").write_text("mine")
    assert "holds other files" in call("demo", "--out", tmp_path).line()
    assert (tmp_path / "noisy.mp4").read_text() == "mine"
    assert "no such file" in call("demo", tmp_path / "gone.mp4", "--out", tmp_path / "demo").line()
    assert not (tmp_path / "demo").exists()
