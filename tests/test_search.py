"""`cdt-fast search`: what is searched over, trials that go on where they were stopped, the best of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdt_fast.errors import InputError
from cdt_fast.experiments.search import Trial, parse_searched, ranked
from cdt_fast.files import read_json
from cdt_fast.tasks import open_evaluated
from cdt_fast.training import loop
from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.settings import VideoSettings
from tests.runs import open_run

Call = Callable[..., Any]
pytest.importorskip("optuna")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr=1..2", "--over must be like"),
        ("training.lr", "--over must be like"),
        ("training.lr=1e-2..1e-4", "the first end of a range must be below the second"),
        ("training.lr=a..b", "the ends of a range must be numbers"),
        ("training.lr=-1..1", r"\[training\] lr must be"),
        ("training.learning=0..1", "unknown key 'learning'"),
        ("trainin.lr=0..1", r"unknown section \[trainin\]; did you mean"),
        ("constraints.objective=last,loq", r"\[constraints\] objective must be"),
        ("model.layers=1.5..3", "the ends of a range must be numbers of its type"),
    ],
)
def test_what_cannot_be_searched_over_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_searched(text, VideoSettings())


def test_a_range_is_of_whole_numbers_where_the_setting_is_one() -> None:
    _, layers = parse_searched("model.layers=1..4", VideoSettings())
    _, rate = parse_searched("training.lr=1e-4..1", VideoSettings())
    assert (layers.low, layers.high, layers.log) == (1, 4, False)
    assert isinstance(layers.low, int)
    assert (rate.low, rate.high, rate.log) == (1e-4, 1.0, True)


def test_trials_are_ranked_by_feasibility_then_by_their_loss() -> None:
    losses = [(0.1, 0.5), (0.3, -0.1), (0.2, None), (0.05, 0.2)]
    trials = [Trial(Path(str(number)), {}, *each) for number, each in enumerate(losses)]
    assert [trial.folder.name for trial in ranked(trials)] == ["2", "1", "3", "0"]


@pytest.mark.slow
def test_a_search_that_was_stopped_goes_on_and_measures_the_best(
    call: Call, trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, started = loop.train, []

    def train(run: RunFolder, *arguments: Any, resume: bool) -> None:
        started.append((run.name, resume))
        if len(started) == 2:
            raise loop.Interrupted(2, 3)
        original(run, *arguments, resume=resume, progress=False)

    monkeypatch.setattr(loop, "train", train)
    over = ["training.lr=1e-4..1e-1", "constraints.objective=last,log", "training.steps=4..6"]
    words = ["search", trained.constrained, "--trials", 3, "--over", *over, "--json", tmp_path / "table.json"]
    stopped = call(*words, "--out", tmp_path / "search")
    assert stopped.status == 130
    assert stopped.err.splitlines()[-1].endswith("continue with: the same command")
    assert call(*words, "--out", tmp_path / "search").status == 0
    assert started == [("trial-000", False), ("trial-001", False), ("trial-001", True), ("trial-002", False)]
    table = read_json(tmp_path / "table.json")["table"]
    assert table[0][1:4] == ["training.lr", "constraints.objective", "training.steps"]
    for row in table[1:]:
        run, settings = open_run(tmp_path / "search" / row[0])
        assert f"{settings.training.lr:.4g}" == row[1]
        assert settings.constraints.objective == row[2]
        assert settings.training.steps == int(row[3])
        assert 1e-4 <= settings.training.lr <= 1e-1
        assert f"{load_checkpoint(run.checkpoint)['best']['loss'][-1]:.5g}" == row[4]
    assert open_evaluated(tmp_path / "search" / table[1][0]).evaluation.finished, "the best is measured on test data"
    assert not (tmp_path / "search" / table[2][0] / "evaluation.json").exists(), "and no other"
    whole = call(*words, "--out", tmp_path / "again")
    assert whole.status == 0
    assert read_json(tmp_path / "table.json")["table"] == table, "as if it had not been stopped"
    line = call("search", trained.plain, "--trials", 3, "--over", *over, "--out", tmp_path / "again").line()
    assert "choose another folder with --out" in line
    assert "--trials must be" in call("search", trained.plain, "--trials", 0, "--over", *over).line()
