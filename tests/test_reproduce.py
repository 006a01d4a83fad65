"""`cdt-fast reproduce`: the experiments that come with the package, and a tiny one from its start to its comparison."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from cdt_fast import experiments
from cdt_fast.cli import commands
from cdt_fast.errors import InputError
from cdt_fast.experiments import study
from cdt_fast.files import read_json
from cdt_fast.tasks import check_comparable, open_evaluated
from cdt_fast.training import loop
from cdt_fast.training.results import t_quantile
from cdt_fast.training.run_folder import RunFolder, RunInUse
from cdt_fast.video.settings import VideoSettings
from tests.runs import open_run
from tests.tiny import TINY

Call = Callable[..., Any]
RUNS = ("plain-0", "plain-1", "constrained-0", "constrained-1")


@pytest.fixture
def tiny_experiment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of an experiment called tiny: two runs of six steps, two seeds each."""
    shared = copy.deepcopy(TINY)
    shared["training"] |= {"steps": 6, "validate_every": 3, "checkpoint_every": 3}
    folder = tmp_path / "experiments"
    folder.mkdir()
    content = {
        "title": "a tiny network",
        "source": "a clip",
        "task": "video",
        "seeds": [0, 1],
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
    first = call("reproduce", "tiny", clip, "--out", out, "--json", tmp_path / "all.json")
    assert first.status == 0, first
    assert sorted(path.name for path in out.iterdir()) == sorted([*RUNS, "comparison"])
    text = (out / "comparison" / "report.md").read_text()
    assert all(f"{name} (" in text for name in RUNS)
    assert (tmp_path / "all.json").exists()
    assert [line for line in first.err.splitlines() if line.startswith("run ")] == [
        f"run {number} of 4: {out / name}" for number, name in enumerate(RUNS, 1)
    ]
    stamps = {name: (out / name / "config.toml").stat().st_mtime_ns for name in RUNS}
    before = {name: weights(out / name) for name in RUNS}

    # One run was stopped before it was measured: nothing but that is done again.
    (out / RUNS[1] / "evaluation.json").unlink()
    (out / RUNS[2] / "report.md").unlink()  # killed while it was written
    second = call("reproduce", "tiny", clip, "--out", out)
    assert second.status == 0, second
    said = [line.partition(str(out))[2] for line in second.err.splitlines() if line.startswith("run ")]
    assert said == [f"/{name}" for name in RUNS[1:3]]
    assert {name: (out / name / "config.toml").stat().st_mtime_ns for name in RUNS} == stamps
    assert {name: weights(out / name) for name in RUNS} == before


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_experiment")
def test_a_run_is_that_of_the_training_command(call: Call, clip: Path, tmp_path: Path) -> None:
    """Whatever was trained before it in the same process."""
    assert call("reproduce", "tiny", clip, "--out", tmp_path / "out").status == 0
    config = tmp_path / "out" / "constrained-1" / "config.toml"
    assert VideoSettings.load(config).constraints.rate == 0.25, "what a run says goes before what all share"
    alone = call("train", "video", "--config", config, "--out", tmp_path / "alone")
    assert alone.status == 0, alone
    assert weights(tmp_path / "alone") == weights(tmp_path / "out" / "constrained-1")


@pytest.mark.usefixtures("tiny_experiment")
def test_a_signal_says_how_to_go_on(call: Call, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, resumed = [], []
    original = loop.train

    def train(run: RunFolder, config: VideoSettings, task: Any, *, resume: bool) -> None:
        resumed.append(resume)
        if len(trained) == 1:
            trained.append("")
            raise loop.Interrupted(2, 3)
        trained.append(run.name)
        original(run, config, task, resume=resume, progress=False)

    monkeypatch.setattr(loop, "train", train)
    answer = call("reproduce", "tiny", clip, "--out", tmp_path / "out", "--seeds", "3")
    assert answer.status == 130
    assert answer.err.splitlines()[-1].endswith("continue with: the same command")
    assert call("reproduce", "tiny", clip, "--out", tmp_path / "out", "--seeds", "3").status == 0
    assert trained == ["plain-3", "", "constrained-3"]
    assert resumed == [False, False, True]


def as_study(file: Path, learning_rates: list[float]) -> None:
    """Make of the tiny experiment a study of three steps a run."""
    content = file.read_text().replace("steps = 6", "steps = 3", 1)
    file.write_text(f'baseline = "plain"\nlearning_rates = {learning_rates}\n{content}')


@pytest.mark.slow
def test_a_study_takes_the_best_learning_rate_and_pairs_by_source_and_seed(
    call: Call, clip: Path, tmp_path: Path, tiny_experiment: Path
) -> None:
    as_study(tiny_experiment, [0.01, 1e-9])
    other = tmp_path / "other.npy"
    other.write_bytes(clip.read_bytes())
    out = tmp_path / "out"
    answer = call("reproduce", "tiny", clip, other, "--out", out, "--json", tmp_path / "study.json")
    assert answer.status == 0, answer
    runs = ["lr0.01-0", "lr1e-09-0", "lr0.01-1"]
    for source in (clip, other):
        folders = sorted(path.name for path in (out / source.stem).iterdir())
        assert folders == sorted(f"{run}-{name}" for run in ("plain", "constrained") for name in runs)
    paired, exits, means = read_json(tmp_path / "study.json")["tables"]
    assert paired[0][:2] == ["% against plain", "pairs"]
    assert [row[:2] for row in paired[1:]] == [["plain", "4"], ["constrained", "4"]]
    places = [(out / source.stem, seed) for source in (clip, other) for seed in (0, 1)]
    losses = [[loss_of(folder / f"{run}-lr0.01-{seed}") for run in ("constrained", "plain")] for folder, seed in places]
    logs = [math.log(constrained / plain) for constrained, plain in losses]
    assert paired[2][2] == str(study.Difference.of(logs))
    assert exits[0] == ["RMSE at γ 0.15 after", "layer 1", "layer 2"]
    for name, row in zip(("plain", "constrained"), exits[1:], strict=True):
        rmse = [
            read_json(folder / f"{name}-lr0.01-{seed}" / "evaluation.json")["depth_rmse"] for folder, seed in places
        ]
        mean = math.prod(depths[0][1] for depths in rmse) ** (1 / len(rmse))
        assert row[:2] == [name, f"{mean:.4g}"]
    assert [row[:3] for row in means[1:]] == [
        [f"{source.stem}: {run}", "0.01", "2"] for source in (clip, other) for run in ("plain", "constrained")
    ]
    assert "| constrained | 4 |" in (out / "study.md").read_text()


def loss_of(run: Path) -> float:
    return read_json(run / "evaluation.json")["layer_loss"][-1]


def test_some_of_the_runs_and_other_steps(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    def train(run: RunFolder, config: VideoSettings, *_: Any, **__: Any) -> None:
        trained.append((run.name, config.training.steps))
        raise loop.Interrupted(2, 3)

    monkeypatch.setattr(loop, "train", train)
    out = ("--out", tmp_path / "out")
    assert call("reproduce", "descent", "clip", "--runs", "anchor,deep", "--steps", 7, *out).status == 130
    assert trained == [("plain-lr0.003-0", 7)]
    chosen = experiments.Experiment.load("descent").narrowed(["anchor", "deep"])
    assert list(chosen.runs) == ["plain", "deep", "anchor"], "the baseline too, in the experiment's order"
    assert list(chosen.narrowed(["deep"], baseline="anchor").runs) == ["deep", "anchor"]
    assert chosen.settings("deep", 0, "clip", None).training.steps == 300


def test_losses_at_other_noise_are_not_set_beside_each_other(trained: Any, tmp_path: Path) -> None:
    plain = open_evaluated(trained.plain)
    values = plain.evaluation.model_copy(update={"training_gamma": 0.5})
    cells = {"clip": {"plain": [plain], "range": [replace(plain, evaluation=values)]}}
    table = study.paired_table(cells, "plain")
    assert dict(zip(*table[::2], strict=True))["ℓ_L"] == ""
    assert dict(zip(*table[::2], strict=True))["mean RMSE"] == "+0.0"
    assert [row[0] for row in study.exit_table(cells, "plain")[1:]] == ["plain"]
    page = study.write_study(tmp_path, "a <study>", cells, "plain", "again").read_text()
    assert "<h1>a &lt;study&gt;</h1>" in page
    assert page.count("<table>") == 3
    assert page.count('src="data:image/svg+xml;base64,') == 2
    assert "http" not in page, "needs no other file"
    exact = plain.evaluation.model_copy(update={"depth_rmse": [[1.0, 0.0, 0.0]] * len(plain.evaluation.depth_rmse)})
    alone = {"clip": {"plain": [replace(plain, evaluation=exact)]}}
    assert study.exits(alone, "plain")[1] == {"plain": [None, None]}
    assert study.write_study(tmp_path, "exact", alone, "plain", "again").read_text().count("<img") == 0
    with pytest.raises(InputError, match=r"training_gamma is 0\.5 and 0\.15"):
        check_comparable([run for group in cells["clip"].values() for run in group])


def test_a_rate_that_the_model_chooses_is_called_so(trained: Any) -> None:
    plain = open_evaluated(trained.plain)
    settings = plain.settings.model_copy(deep=True)
    settings.training = settings.training.model_copy(update={"lr": None})  # as of texts
    cells = {"reviews": {"plain": [plain, replace(plain, settings=settings)]}}
    assert study.source_table(cells)[1][1] == f"{plain.settings.training.lr:g} the model's"


@pytest.mark.slow
def test_what_another_process_trains_is_left_to_it(
    call: Call, clip: Path, tmp_path: Path, tiny_experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others come first, and the run is looked at again at the end."""
    out, original, order = tmp_path / "out", loop.train, []

    def train(run: RunFolder, config: VideoSettings, task: Any, *, resume: bool) -> None:
        order.append(run.name)
        if len(order) == 1:  # the other process has just made the folder, and trains
            raise RunInUse(f"{run.path}: another process is training this run")
        original(run, config, task, resume=resume, progress=False)

    monkeypatch.setattr(loop, "train", train)
    monkeypatch.setattr(commands, "_WAIT", 0.0)
    answer = call("reproduce", "tiny", clip, "--out", out, "--seeds", "0")
    assert answer.status == 0, answer
    assert order == ["plain-0", "constrained-0", "plain-0"]
    assert "plain-0: another process is training this run; the next one first" in answer.err


def test_two_sources_of_one_name_are_refused(call: Call, clip: Path, tmp_path: Path) -> None:
    line = call("reproduce", "video", clip, tmp_path / "more" / clip.name, "--out", tmp_path / "out").line()
    assert f"SOURCE: two of {clip.stem}, {clip.stem} would have one folder" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.7062047), (2, 4.3026527), (11, 2.2009852), (100, 1.9839715)])
def test_the_quantiles_of_student(degrees: int, quantile: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(quantile, abs=1e-6)


def test_a_difference_is_a_geometric_mean_with_its_interval() -> None:
    assert study.Difference.of([]) is None
    assert str(study.Difference.of([math.log(1.1)])) == "+10.0"
    # Logarithms 0 and 0.2: mean 0.1, standard error 0.1, t 12.706.
    low, high = (100 * math.expm1(0.1 + sign * 1.27062047) for sign in (-1, 1))
    assert str(study.Difference.of([0.0, 0.2])) == f"+10.5 [{low:+.1f}, {high:+.1f}]"


def test_a_folder_with_a_run_of_other_settings_is_left_alone(
    call: Call, clip: Path, tmp_path: Path, tiny_experiment: Path
) -> None:
    out = tmp_path / "out"
    assert call("reproduce", "tiny", clip, "--out", out, "--seeds", "0").status == 0
    before = weights(out / "constrained-0")
    tiny_experiment.write_text(tiny_experiment.read_text().replace("steps = 6", "steps = 7", 1))
    line = call("reproduce", "tiny", clip, "--out", out, "--seeds", "0").line()
    assert f"{out / 'plain-0'}: holds a run with [training] steps 6, and the experiment has 7" in line
    assert weights(out / "constrained-0") == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["film", "clip"], "NAME must be one of ablation, denoiser, descent, encoder, exits, exits-smollm2, "),
        (["encoder", "reviews"], "--model is None, and encoder needs the folder of a pretrained encoder"),
        (["video", "clip", "--model", "bert"], "--model is 'bert', and video trains a network of its own"),
        (["video", "clip", "--seeds", "0,a"], "argument --seeds: invalid _numbers value: '0,a'"),
        (
            ["video", "clip", "--runs", "tied,deep"],
            "--runs and --baseline must be of tied, untied, constrained, got 'deep'",
        ),
        (
            ["video", "clip", "--baseline", "deep"],
            "--runs and --baseline must be of tied, untied, constrained, got 'deep'",
        ),
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


def test_an_experiment_that_cannot_be_read_is_in_the_way_of_no_other_command(call: Call, tiny_experiment: Path) -> None:
    tiny_experiment.write_text("title = ")
    assert call("data", "fetch", "--help").status == 0
    for words in (["--help"], ["tiny", "demo"]):
        assert str(tiny_experiment) in call("reproduce", *words).line()


def test_several_processes_are_sent_to_the_training_command(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "reproduce trains in one process" in call("reproduce", "video", "demo").line()


@pytest.mark.parametrize("name", experiments.names())
def test_the_experiments_of_the_package(call: Call, name: str) -> None:
    experiment = experiments.Experiment.load(name)
    planned = experiments.plan(experiment, ["data"], "encoder" if experiment.model else None, "out")
    of_a_run = len(experiment.learning_rates or experiment.seeds)
    assert len({run.path for run in planned}) == len(planned) == len(experiment.runs) * of_a_run
    assert experiment.baseline in ("", *experiment.runs)
    assert {run.settings.constrained for run in planned} == {True, False}
    assert all(run.settings.data.source == str(Path("data").resolve()) for run in planned)
    assert f"  {name}: " in call("reproduce", "--help").out


def test_the_reference_of_a_run_is_another_one_of_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder until it is trained and measured, then its losses."""

    def resolved(settings: Any) -> None:
        assert settings.constraints.reference_losses == str(tmp_path / "plain-3")
        settings.constraints.reference_losses = [1.0, 0.5]

    def references() -> set[Any]:
        experiment = experiments.Experiment.load("exits").narrowed(seeds=[3])
        planned = experiments.plan(experiment, ["data"], None, tmp_path)
        return {str(run.settings.constraints.reference_losses) for run in planned if run.run.startswith("bounded")}

    monkeypatch.setattr(experiments, "resolve_reference", resolved)
    assert references() == {str(tmp_path / "plain-3")}
    (tmp_path / "plain-3").mkdir()
    RunFolder(tmp_path / "plain-3").evaluation.touch()
    assert references() == {"[1.0, 0.5]"}


# What the documents' tables were made with, run by run.
_PAPER = "video clip --steps 5000 --validate-every 250 --checkpoint-every 250"
_IMDB = "text aclImdb --preset paper-text-ut --validate-every 250 --checkpoint-every 250"
_REVIEWS = "text reviews --text-column Text --label-column Sentiment --max-tokens 128"
_PAIRS = "text nli --text-column sentence1 --second-column sentence2 --label-column gold_label --max-tokens 64"
_ENCODER = "--model ENCODER --precision bf16 --epochs 5 --batch 8 --checkpoint-every 500 --validate-every 100"
_INSTRUCTIONS = "lm alpaca --max-tokens 192 --vocabulary-size 2048 --width 128"


@pytest.mark.parametrize(
    ("name", "run", "command"),
    [
        ("paper-avenue", "tied", f"{_PAPER} --preset paper-dust --no-constrained"),
        ("paper-ucsd", "untied", f"{_PAPER} --preset paper-ut --no-constrained --no-tied"),
        ("paper-ucsd", "constrained", f"{_PAPER} --preset paper-ut"),
        ("paper-imdb", "plain", f"{_IMDB} --no-constrained"),
        ("paper-imdb", "constrained", _IMDB),
        ("reviews", "constrained", _REVIEWS),
        ("reviews", "plain", f"{_REVIEWS} --no-constrained"),
        ("encoder", "constrained", f"{_REVIEWS} {_ENCODER}"),
        ("encoder", "plain", f"{_REVIEWS} {_ENCODER} --no-constrained"),
        ("pairs", "constrained", f"{_PAIRS} {_ENCODER} --reference 1.43"),
        ("pairs", "plain", f"{_PAIRS} {_ENCODER} --no-constrained"),
        ("instructions", "constrained", _INSTRUCTIONS),
        ("instructions", "anchor-12", f"{_INSTRUCTIONS} --reference 12 --coupling chain --margin 0.1"),
        ("instructions", "plain", f"{_INSTRUCTIONS} --no-constrained"),
    ],
)
def test_a_run_has_the_settings_of_the_documents(
    call: Call, name: str, run: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "train", lambda *_, **__: None)
    monkeypatch.setattr(commands, "_evaluate", lambda *_: 0)
    answer = call("train", *command.split(), "--seed", 2, "--out", tmp_path / "run")
    assert answer.status == 0, answer
    _, expected = open_run(tmp_path / "run", trained=False)
    experiment = experiments.Experiment.load(name)
    model = "ENCODER" if experiment.model else None
    assert experiment.settings(run, 2, expected.data.source, model) == expected
