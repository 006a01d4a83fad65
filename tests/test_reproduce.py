"""`cdt-fast reproduce`: the experiments that come with the package, and a tiny one from its start to its comparison."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w

from cdt_fast import experiments
from cdt_fast.checks import InputError
from cdt_fast.experiments import running
from cdt_fast.tasks import open_evaluated, open_run
from cdt_fast.training import loop
from cdt_fast.training.results import t_quantile
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.settings import VideoSettings
from tests.runs import Call
from tests.tiny import TINY

RUNS = ("plain-0", "constrained-0", "plain-1", "constrained-1")


@pytest.fixture
def tiny_experiment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of an experiment called tiny: two runs of six steps, two seeds each."""
    shared = copy.deepcopy(TINY)
    shared["training"] |= {"steps": 6, "validate_every": 3}
    folder = tmp_path / "experiments"
    folder.mkdir()
    content = {
        "title": "a tiny network",
        "source": "a clip",
        "task": "video",
        "cells": [{"seeds": [0, 1]}],
        "shared": shared,
        "runs": {"plain": {"constraints": {"constrained": False}}, "constrained": {"constraints": {"rate": 0.25}}},
    }
    (folder / "tiny.toml").write_text(tomli_w.dumps(content))
    monkeypatch.setattr(experiments, "FOLDER", folder)
    return folder / "tiny.toml"


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_experiment")
def test_every_run_is_trained_measured_and_compared_and_only_once(call: Call, clip: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = call("reproduce", "tiny", clip, "--out", out)
    assert first.status == 0, first
    assert sorted(path.name for path in out.iterdir()) == sorted([*RUNS, "comparison", "results.html"])
    text = (out / "comparison" / "report.html").read_text()
    assert all(f"{name} (" in text for name in RUNS)
    assert [line for line in first.err.splitlines() if line.startswith("run ")] == [
        f"run {number} of 4: {out / name}" for number, name in enumerate(RUNS, 1)
    ]
    stamps = {name: (out / name / "config.toml").stat().st_mtime_ns for name in RUNS}
    before = {name: weights(out / name) for name in RUNS}

    # One run was stopped before it was measured: nothing but that is done again.
    (out / RUNS[1] / "evaluation.json").unlink()
    (out / RUNS[2] / "report.html").unlink()  # killed while it was written
    second = call("reproduce", "tiny", clip, "--out", out)
    assert second.status == 0, second
    said = [line.partition(str(out))[2] for line in second.err.splitlines() if line.startswith("run ")]
    assert said == [f"/{name}" for name in RUNS[1:3]]
    assert {name: (out / name / "config.toml").stat().st_mtime_ns for name in RUNS} == stamps
    assert {name: weights(out / name) for name in RUNS} == before

    # A run is that of the training command, whatever was trained before it in the same process.
    config = out / "constrained-1" / "config.toml"
    assert VideoSettings.load(config).constraints.rate == 0.25, "what a run says goes before what all share"
    alone = call("train", "video", "--config", config, "--out", tmp_path / "alone")
    assert alone.status == 0, alone
    assert weights(tmp_path / "alone") == before["constrained-1"]


@pytest.mark.usefixtures("tiny_experiment")
def test_a_trial_is_measured_on_less_and_again_where_it_is_not_one(call: Call, clip: Path, tmp_path: Path) -> None:
    out, chosen = tmp_path / "out", ("--seeds", "0", "--runs", "plain")
    assert call("reproduce", "tiny", clip, "--out", out, "--limit", 1, *chosen).status == 0
    line = call("reproduce", "tiny", clip, "--out", out, *chosen).line()
    assert f"{out / 'plain-0'}: holds a run with [evaluation] limit 1, and the experiment has None" in line
    assert call("reproduce", "tiny", clip, "--out", tmp_path / "all", *chosen).status == 0
    # What was measured on less in between does not count.
    assert call("evaluate", tmp_path / "all" / "plain-0", "--limit", 1).status == 0
    assert call("reproduce", "tiny", clip, "--out", tmp_path / "all", *chosen).status == 0
    assert open_evaluated(tmp_path / "all" / "plain-0").evaluation.limit is None


@pytest.mark.usefixtures("tiny_experiment")
def test_a_signal_says_how_to_go_on(call: Call, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, resumed = [], []
    original = loop.train

    def train(run: RunFolder, config: VideoSettings, task: Any, data: Any, *, resume: bool) -> Any:
        resumed.append(resume)
        if len(trained) == 1:
            trained.append("")
            raise loop.Interrupted(2, 3)
        trained.append(run.name)
        return original(run, config, task, data, resume=resume, progress=False)

    monkeypatch.setattr(loop, "train", train)
    answer = call("reproduce", "tiny", clip, "--out", tmp_path / "out", "--seeds", "3")
    assert answer.status == 130
    assert answer.err.splitlines()[-1].endswith("continue with: the same command")
    assert call("reproduce", "tiny", clip, "--out", tmp_path / "out", "--seeds", "3").status == 0
    assert trained == ["plain-3", "", "constrained-3"]
    assert resumed == [False, False, True]


@pytest.mark.usefixtures("tiny_experiment")
def test_two_processes_share_the_runs_of_a_folder(call: Call, clip: Path, tmp_path: Path) -> None:
    """A run that another process trains is passed over; the process that ends last compares them."""
    out = tmp_path / "out"
    assert call("reproduce", "tiny", clip, "--out", out, "--runs", "plain", "--seeds", "0").status == 0
    (out / "results.html").unlink()
    (out / "plain-0" / "report.html").unlink()  # the other process is about to write it
    with RunFolder(out / "plain-0").lock():
        answer = call("reproduce", "tiny", clip, "--out", out, "--seeds", "0")
    assert answer.status == 0, answer
    assert answer.out.splitlines()[-1] == (
        "left to another process, which then compares all: plain-0; if there is none, call this again"
    )
    assert (out / "constrained-0" / "report.html").exists()
    assert not (out / "results.html").exists()
    answer = call("reproduce", "tiny", clip, "--out", out, "--seeds", "0")
    assert answer.err.startswith("1 of 2 runs to train: about ")
    lines = (out / "results.html").read_text().splitlines()
    rows = [re.findall("<t[hd]>([^<]*)</t[hd]>", line) for line in lines if line.startswith("<tr>")]
    assert rows[0] == ["mean RMSE", "layers", "γ", "the paper", "here", "seeds", "feasible", "every layer descends"]
    assert [row[0] for row in rows[1:]] == ["plain", "constrained"]
    assert [row[1:4] for row in rows[1:]] == [["2", "0.15", ""]] * 2
    expected = [open_evaluated(out / f"{name}-0").evaluation.mean_rmse for name in ("plain", "constrained")]
    assert [row[4] for row in rows[1:]] == [f"{value:.3f}" for value in expected]


def test_a_forecast_times_what_takes_equally_long_once(
    call: Call, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_experiment: Path
) -> None:
    """Seeds and rates of descent make no difference, constraints do."""
    timed = []

    def times(run: experiments.PlannedRun, _: Any) -> tuple[int, float, float, float]:
        timed.append(run.run)
        return 6, 10.0, 20.0, 40.0  # 6 steps of 10 s, two validations of 20 s, 40 s of evaluation

    def train(*_: Any, **__: Any) -> None:
        raise loop.Interrupted(2, 3)

    monkeypatch.setattr(running, "_times", times)
    monkeypatch.setattr(loop, "train", train)
    tiny_experiment.write_text(tiny_experiment.read_text() + "\n[runs.steep.constraints]\nrate = 0.5\n")
    answer = call("reproduce", "tiny", clip, "--out", tmp_path / "out")
    assert timed == ["plain", "constrained"]
    assert "6 of 6 runs to train: about 14 min" in answer.err


def test_a_forecast_is_by_steps_after_the_warm_up(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_experiment: Path
) -> None:
    """Until then depths without a weight have no gradient."""
    more = "\n[runs.later.constraints]\nwarmup_epochs = 2\n"
    tiny_experiment.write_text(tiny_experiment.read_text() + more)
    steps, step = [], loop.Trainer._train_step

    def train_step(trainer: loop.Trainer) -> None:
        steps.append(trainer.step - trainer.warmup_steps)
        step(trainer)

    monkeypatch.setattr(loop.Trainer, "_train_step", train_step)
    experiment = experiments.Experiment.load("tiny").narrowed(["later"])
    running.forecast(experiment, experiments.plan(experiment, str(clip), tmp_path / "out"))
    assert steps == [0, 1, 2, 3]


def test_another_data_set_is_refused_before_anything_is_trained(
    call: Call, clip: Path, tmp_path: Path, tiny_experiment: Path
) -> None:
    tiny_experiment.write_text('sizes = { "training frames" = 61 }\n' + tiny_experiment.read_text())
    line = call("reproduce", "tiny", clip, "--out", tmp_path / "out").line()
    assert line.strip().endswith(f"{clip}: holds 60 training frames, not the 61 of a clip")
    assert not (tmp_path / "out").exists()


def test_some_of_the_runs_and_other_steps(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    monkeypatch.setattr(running, "forecast", lambda *_: (1.0, None))

    def train(run: RunFolder, config: VideoSettings, *_: Any, **__: Any) -> None:
        trained.append((run.name, config.training.steps))
        raise loop.Interrupted(2, 3)

    monkeypatch.setattr(loop, "train", train)
    out = ("--out", tmp_path / "out")
    assert call("reproduce", "ablation", "clip", "--runs", "rate-0_2,default", "--steps", 7, *out).status == 130
    assert trained == [("default-0", 7)]
    chosen = experiments.Experiment.load("ablation").narrowed(["rate-0_2", "default"])
    assert list(chosen.runs) == ["default", "rate-0_2"], "in the experiment's order"
    assert chosen.settings("default", chosen.cells[0], 0, "clip").training.steps == 300
    dust = experiments.Experiment.load("paper-dust")
    cells = dust.narrowed(layers=[7], gammas=[0.11, 0.15], seeds=[4]).cells
    assert [(cell.layers, cell.gamma, cell.seeds) for cell in cells] == [(7, 0.15, [4]), (7, 0.11, [4])]
    with pytest.raises(InputError, match=r"--gammas must be of 0\.15, got 0\.11"):
        dust.narrowed(layers=[3], gammas=[0.11])


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.7062047), (2, 4.3026527), (11, 2.2009852), (100, 1.9839715)])
def test_the_quantiles_of_student(degrees: int, quantile: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(quantile, abs=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["film", "clip"], "there is no experiment 'film'; known: ablation"),
        (["video", "clip", "--seeds", "0,a"], "argument --seeds: must be whole numbers, as in 3,7, got '0,a'"),
        (["video", "clip", "--runs", "plain,deep"], "--runs must be of plain-tied, plain, constrained, got 'deep'"),
        (["paper-dust", "ped2", "--gammas", ""], "argument --gammas: must be numbers, as in 0,0.15, got ''"),
        (["video", "clip", "--layers", "7"], "--layers: video has none to choose from, got 7"),
        (["paper-encoder", "imdb"], "--model is missing, the folder of the network that paper-encoder trains"),
        (["paper-dust", "ped2", "--model", "vit"], "--model: paper-dust takes no pretrained network"),
        (["video", "clip", "--steps", "0"], "[training] steps must be greater than or equal to 1, got 0"),
        (["video", "clip", "--seeds", "-1"], "[training] seed must be greater than or equal to 0, got -1"),
    ],
)
def test_bad_input_is_one_line_and_makes_no_folder(
    call: Call, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in call("reproduce", *words).line()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", experiments.names())
def test_the_experiments_of_the_package(call: Call, name: str) -> None:
    experiment = experiments.Experiment.load(name)
    planned = experiments.plan(experiment, "data", "out")
    trainings = len(experiment.runs) * sum(len(cell.seeds) for cell in experiment.cells)
    assert len({run.path for run in planned}) == len(planned) == trainings
    assert {run.settings.constrained for run in planned} == {True, False}
    assert all(run.settings.data.source == str(Path("data").resolve()) for run in planned)
    assert f"  {name}: " in call("reproduce", "--help").out


# What the documents' tables were made with, run by run.
_PAPER = "video clip --steps 300 --batch 4 --validate-every 50"
_IMDB = "text aclImdb --preset paper-text-ut --validate-every 400 --gamma 1"


@pytest.mark.parametrize(
    ("name", "run", "command"),
    [
        ("paper-dust", "plain-tied", f"{_PAPER} --preset paper-dust --no-constrained --lr 0.016"),
        ("paper-ut", "plain", f"{_PAPER} --preset paper-ut --no-constrained --no-tied"),
        ("paper-ut", "paper", f"{_PAPER} --preset paper-ut"),
        ("paper-text-ut", "plain", f"{_IMDB} --no-constrained"),
        ("paper-text-ut", "paper", _IMDB),
    ],
)
def test_a_run_has_the_settings_of_the_documents(
    call: Call, name: str, run: str, command: str, tmp_path: Path, untrained: None
) -> None:
    answer = call("train", *command.split(), "--seed", 2, "--out", tmp_path / "run")
    assert answer.status == 0, answer
    _, expected = open_run(tmp_path / "run", trained=False)
    experiment = experiments.Experiment.load(name)
    assert experiment.settings(run, experiment.cells[0], 2, expected.data.source) == expected


def test_the_picture_shows_means_over_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(3, "plain", 9.0), (7, "plain", 8.0), (7, "plain", 6.0), (3, "paper", 10.0), (7, "paper", 12.0)]
    monkeypatch.setattr(
        running,
        "open_evaluated",
        lambda number: SimpleNamespace(
            evaluation=SimpleNamespace(
                layers=found[number][0], headline=found[number][2], training_gamma=0.15, HEADLINE="RMSE"
            )
        ),
    )
    figures: list[Any] = []
    monkeypatch.setattr(running, "as_png", lambda figure: figures.append(figure) or b"")
    planned: list[Any] = [SimpleNamespace(path=number, run=run) for number, (_, run, _) in enumerate(found)]
    assert running.picture(planned[:1]) == running.picture(planned[::3]) == []
    (picture,) = running.picture(planned)
    assert "RMSE over the number of layers" in picture
    lines = {line.get_label(): line.get_xydata().tolist() for line in figures[0].axes[0].get_lines()}
    assert lines == {"plain, γ 0.15": [[3, 9], [7, 7]], "paper, γ 0.15": [[3, 10], [7, 12]]}
