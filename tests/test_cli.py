from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import cdt_fast
from cdt_fast.cli.parser import build_parser
from cdt_fast.files import read_json, write_json
from cdt_fast.tasks import TASKS, open_run
from cdt_fast.training.checkpoint import load_checkpoint, save_checkpoint
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video import task
from cdt_fast.video.settings import VideoSettings
from tests.runs import Call, Config
from tests.tiny import TINY, words_of_command

COMMANDS = ["", "train", "train video", "train text", "train lm", "evaluate", "compare", "denoise", "reproduce", "info"]


@pytest.fixture
def settings_of(untrained: None, call: Call, tmp_path: Path) -> Callable[..., VideoSettings]:
    """The settings that a call of `train video` begins with, as its config.toml has them."""
    count = iter(range(100))

    def call_and_read(*words: object) -> VideoSettings:
        out = tmp_path / f"run{next(count)}"
        answer = call("train", "video", *words, "--out", out)
        assert answer.status == 0, answer
        return open_run(out, trained=False)[1]

    return call_and_read


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_that_parses(call: Call, command: str) -> None:
    answer = call(*command.split(), "--help")
    assert answer.status == 0
    assert answer.err == ""
    _, found, example = answer.out.partition("example")
    assert found
    line = next(line for line in example.splitlines() if "cdt-fast " in line)
    words = shlex.split(line.partition("cdt-fast ")[2])
    assert words[: len(command.split())] == command.split()
    build_parser().parse_args(words)


def test_the_examples_of_trainings_are_of_settings_that_fit() -> None:
    for name, entry in TASKS.items():
        for example in entry.examples:
            options = vars(build_parser().parse_args(["train", name, *shlex.split(example)]))
            given: dict[str, Any] = {}
            for key, value in options.items():
                section, dot, setting = key.partition(".")
                given.setdefault(section, {}).update({setting: value} if dot and value is not None else {})
            entry.settings.chosen({section: values for section, values in given.items() if values})


def test_help_tells_every_default(call: Call) -> None:
    text = " ".join(call("train", "video", "--help-all").out.split())
    defaults = VideoSettings()
    for shown in (
        f"T, frames per window ({defaults.data.window})",
        f"L ({defaults.model.layers})",
        f"optimizer steps ({defaults.training.steps})",
        "train with descent constraints (yes)",
    ):
        assert shown in text


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("", ["COMMAND"]),
        ("trian", ["COMMAND: invalid choice: 'trian' (choose from", "train"]),
        ("train video", ["SOURCE is missing"]),
        ("train video --stpes 3", ["cdt-fast train video:", "--stpes", "did you mean --steps?"]),
        ("train video --batchsize=3", ["--batchsize=3", "did you mean --batch"]),
        ("denoise a.mp4 b.mp4 --sigma loud", ["--sigma: must be a number of gray levels, or auto, got 'loud'"]),
        ("train video a.mp4 b.mp4", ["unknown argument: b.mp4"]),
        ("train video --steps ten", ["[training] steps must be a valid integer", "got 'ten'"]),
        ("train video --gammas 1,1e9", ["[evaluation] gammas must be less than or equal to 1000000, got '1,1e9'"]),
        ("train video --config no.toml", ["cdt-fast: no.toml: cannot be read as TOML (No such file"]),
        ("train video missing.mp4", ["missing.mp4", "no such file"]),
        ("train video --resume missing", ["missing: is no run folder"]),
        ("train video --resume missing --steps 3", ["--resume takes no other settings"]),
        ("evaluate", ["RUN is missing: cdt-fast evaluate RUN"]),
        ("evaluate missing", ["missing: is no run folder"]),
        ("evaluate --clips CLIP --out CLIP", ["--out must be the page to write, a .html file, got"]),
        ("train video CLIP --out=", ["cdt-fast train video: argument --out: must not be empty"]),
        ("compare missing --out=", ["argument --out: must not be empty"]),
        ("train video --resume=", ["argument --resume: must not be empty"]),
        (f"train video CLIP --seed {2**63}", ["[training] seed must be less than"]),
        ("denoise a.mp4 b.mp4 --run missing", ["missing: is no run folder"]),
        ("denoise in.mp4 out.mp4 --depth two", ["--depth", "two"]),
        ("train video CLIP --no-adaptive", ["unknown argument: --no-adaptive"]),
        ("train video CLIP --preset paper-vit", ["--preset paper-vit needs --pretrained, the folder"]),
    ],
)
def test_a_wrong_call_is_one_line_and_leaves_nothing(
    call: Call, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, facts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = call(*(clip if word == "CLIP" else word for word in words.split())).line()
    assert line.startswith("cdt-fast")
    for fact in facts:
        assert fact in line
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"window": 61}, "61"),
        ({"lr": 1e30}, "no longer finite"),
        ({"lr": 1e31}, "[training] lr must be at most 1e+30, got 1e+31"),
    ],
)
def test_settings_that_cannot_be_used_are_one_line_and_leave_no_run(
    call: Call, clip: Path, tmp_path: Path, changes: dict[str, Any], fact: str
) -> None:
    words = words_of_command(TINY, **changes, validate_every=6)
    answer = call("train", "video", clip, "--out", tmp_path / "run", *words)
    assert answer.status == 2
    assert fact in answer.err.splitlines()[-1]
    assert answer.err.splitlines()[-1].startswith("cdt-fast: ")
    assert "Traceback" not in answer.err
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_to_resume_is_never_removed(call: Call, tmp_path: Path, tiny_config: Config) -> None:
    config = tiny_config()
    config.data.source = str(tmp_path / "gone.npy")
    run = RunFolder.create(tmp_path / "run", config)
    assert "gone.npy" in call("train", "video", "--resume", run.path).line()
    assert run.config.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_run_whose_model_is_not_whole_is_refused_by_all_in_the_same_words(
    call: Call, copied_run: RunFolder, clip: Path, tmp_path: Path, name: str
) -> None:
    (copied_run.model / name).unlink()
    denoise = ("denoise", "--run", copied_run.path, clip, tmp_path / "out.mp4")
    for words in (("train", "video", "--resume", copied_run.path), ("evaluate", copied_run.path), denoise):
        said = "its model is gone; remove the whole folder to train it anew"
        assert call(*words).line() == f"cdt-fast: {copied_run.path}: {said}\n"


def test_training_prints_tables_a_verdict_and_the_report(
    call: Call, clip: Path, tmp_path: Path, quick_figures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, read = tmp_path / "run", Mock(wraps=task.load)
    monkeypatch.setattr(task, "load", read)
    answer = call("train", "video", clip, "--out", run, *words_of_command(TINY))
    assert answer.status == 0
    assert read.call_count == 1, "the evaluation reads the data again"
    assert "\r" not in answer.err
    first, *others = answer.out.strip().split("\n\n")[0].splitlines()
    assert first.split("  ")[-1] == "than plain training"
    assert [line.split("  ")[0] for line in others[1:]] == ["the input", "3-D DCT", "run (constrained, chain, untied)"]
    evaluation = read_json(run / "evaluation.json")
    assert evaluation["verdict"].startswith("no success: ")  # of six steps
    assert evaluation["report"]["text"] not in answer.out
    assert answer.out.splitlines()[-1] == f"report: {run / 'report.html'}"
    names = "config.toml metrics.jsonl model checkpoint evaluation.json report.html frames.safetensors"
    assert {path.name for path in run.iterdir()} == {*names.split()}
    assert "holds a run already" in call("train", "video", clip, "--out", run, *words_of_command(TINY)).line()


def test_evaluate_measures_at_the_levels_that_are_given_and_no_more_than_the_limit(
    call: Call, copied_run: RunFolder, quick_figures: None
) -> None:
    answer = call("evaluate", copied_run.path, "--gammas", "0.1,0.2,0.3", "--limit", 2)
    assert answer.status == 0
    assert answer.err == ""
    evaluation = read_json(copied_run.evaluation)
    assert (evaluation["gamma"], evaluation["limit"]) == ([0.1, 0.2, 0.3], 2)
    text = (copied_run.path / "report.html").read_text()
    assert "<th>γ 0.3</th>" in text
    assert "--gammas 0.1,0.2,0.3 --limit 2</code> makes this page." in text
    for words, message in (
        ("--gammas=-1", "[evaluation] gammas must be greater than or equal to 0"),
        ("--gammas=25", "[evaluation] gammas reaches 25 standard deviations"),
        ("--limit=0", "limit must be greater than or equal to 1"),
        ("--out=page.html", "--out is for --clips"),
    ):
        assert message in call("evaluate", copied_run.path, words).line()
    assert "--gammas and --limit are for RUN alone" in call("evaluate", "--clips", "a.mp4", "--limit", 2).line()


def test_a_run_that_is_not_finished_is_measured_with_a_note(
    call: Call, copied_run: RunFolder, quick_figures: None
) -> None:
    save_checkpoint(copied_run.checkpoint, {**load_checkpoint(copied_run.checkpoint), "steps": 60})
    answer = call("evaluate", copied_run.path)
    assert answer.status == 0
    assert ": the training is not finished, this is step 30 of 60\n" in answer.out


def test_options_win_over_a_file_and_a_file_over_the_defaults(
    settings_of: Callable[..., VideoSettings], clip: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[data]\nsource = "other.npy"\nwindow = 7\n[training]\nsteps = 11\nbatch = 3\n')
    config = settings_of(clip, "--config", file, "--steps", "5", "--rate", "0.1,0.2")
    assert (config.data.source, config.data.window, config.constraints.rate) == (str(clip), 7, [0.1, 0.2])
    assert config.training == VideoSettings().training.model_copy(update={"steps": 5, "batch": 3})
    assert settings_of("--config", file).data.source == str(Path("other.npy").resolve())


def test_flags_can_be_set_and_unset(settings_of: Callable[..., VideoSettings], tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    whole = 'source = "demo"\nframes = "resized"\npatch_frames = 1'
    file.write_text(f"[data]\n{whole}\n[constraints]\nconstrained = false\n[model]\ntied = true\n")
    assert settings_of("--config", file).constraints.constrained is False
    assert settings_of("--config", file, "--constrained").constraints.constrained is True
    assert settings_of("demo", "--no-constrained").constraints.constrained is False
    assert settings_of("--config", file, "--no-tied").model.tied is False
    assert settings_of("demo", "--preset", "paper-dust", "--tied").model.tied is True
    assert settings_of("demo").model.tied is None


def test_a_run_gets_a_name_from_its_source(
    call: Call, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untrained: None
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("train", "video", clip).status == 0
    assert call("train", "video", clip).status == 0
    assert call("train", "video", "demo", "--no-constrained").status == 0
    assert sorted(os.listdir(tmp_path / "runs")) == ["clip-constrained", "clip-constrained-2", "demo-unconstrained"]


def test_files_cut_short_are_named_in_one_line(call: Call, copied_run: RunFolder, clip: Path, tmp_path: Path) -> None:
    run, before = copied_run, copied_run.evaluation.read_bytes()
    evaluate, resume = ("evaluate", run.path), ("train", "video", "--resume", run.path)
    for path in (run.model / "model.safetensors", run.model / "config.json", run.config, run.checkpoint):
        whole = path.read_bytes()
        path.write_bytes(whole[: whole.rindex(b" = ") + 3 if path == run.config else len(whole) * 2 // 3])
        other = resume if path == run.checkpoint else ("denoise", "--run", run.path, clip, tmp_path / "out.mp4")
        for command in (evaluate, other):
            assert str(path) in call(*command).line(), path.name
        path.write_bytes(whole)
    assert run.evaluation.read_bytes() == before
    assert not (tmp_path / "out.mp4").exists()


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """As `cdt-fast --help | head -1` does. A process of its own, since the pipe is its stdout."""
    program = "import sys; from cdt_fast import cli; sys.exit(cli.main(['info']))"
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run([sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert process.stderr == ""
    assert process.returncode == 141


def test_the_version_is_that_of_the_package(call: Call) -> None:
    assert call("--version").out == f"cdt-fast {cdt_fast.__version__}\n"
    module = subprocess.run([sys.executable, "-m", "cdt_fast", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == f"cdt-fast {cdt_fast.__version__}\n"


def test_a_denoiser_out_of_memory_has_no_batch_to_make_smaller(
    call: Call, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("cdt_fast.video.denoising.Denoising.plane", exhausted)
    answer = call("denoise", clip, tmp_path / "clean.mp4")
    assert answer.status == 2
    assert answer.err.splitlines()[-1] == "cdt-fast: out of memory"
    assert not (tmp_path / "clean.mp4").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP")
def test_threads_that_wait_do_not_spin_for_long() -> None:
    """Set before torch is imported, when GNU OpenMP reads it and, if asked, shows what it read."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    for more, expected in (({}, "4000"), ({"GOMP_SPINCOUNT": "77"}, "77")):
        environment = {**given, **more, "OMP_DISPLAY_ENV": "verbose"}
        call = [sys.executable, "-m", "cdt_fast", "info"]
        shown = subprocess.run(call, env=environment, capture_output=True, text=True, check=True).stderr
        assert f"GOMP_SPINCOUNT = '{expected}'" in shown


def test_an_evaluation_from_before_more_training_is_not_compared(call: Call, copied_run: RunFolder) -> None:
    evaluation = read_json(copied_run.evaluation)
    write_json(copied_run.evaluation, {**evaluation, "trained_steps": 26})
    line = call("compare", copied_run.path).line()
    assert "was evaluated after step 26 and trained to step 30 since" in line
    assert "cdt-fast evaluate" in line


def test_other_frames_of_the_same_name_are_not_the_same_data(
    call: Call, clip: Path, tmp_path: Path, quick_figures: None
) -> None:
    source, runs = tmp_path / "clip.npy", [tmp_path / "first", tmp_path / "second"]
    for run, frames in zip(runs, (np.load(clip), np.load(clip)[:, ::-1]), strict=True):
        np.save(source, frames)
        assert call("train", "video", source, "--out", run, *words_of_command(TINY)).status == 0
    first, second = (read_json(run / "evaluation.json") for run in runs)
    assert first["test_windows"] == second["test_windows"]
    assert first["baseline_rmse"] != second["baseline_rmse"], "of the other frames"
    assert "on different data: data_digest is" in call("compare", *runs, "--out", tmp_path / "both").line()
    for words in (("evaluate", runs[0]), ("train", "video", "--resume", runs[0])):
        assert "the windows are not those that" in call(*words).line()
    assert read_json(runs[0] / "evaluation.json") == first


def test_an_output_without_greek_letters_is_no_error(copied_run: RunFolder, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "cdt_fast", "compare", copied_run.path, "--out", tmp_path / "page"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert (
        "RMSE at \\u03b3" in subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    )


def test_a_vit_trains_and_is_measured(call: Call, clip: Path, tmp_path: Path, quick_figures: None) -> None:
    pytest.importorskip("transformers")
    vit = ["--preset", "paper-vit", "--pretrained", "none"]
    words = [*vit, "--layers", 2, "--width", 12, "--steps", 2]
    words += ["--size", 32, "--patch", 8, "--window", 5, "--batch", 2, "--device", "cpu", "--gammas", 0.15]
    answer = call("train", "video", clip, "--out", tmp_path / "run", *words)
    assert answer.status == 0, answer
    assert "run (constrained, chain, vit)" in answer.out
    small = call("denoise", "--run", tmp_path / "run", clip, tmp_path / "out.mp4")
    assert small.status == 0
    assert "patch_frames must be 1 for whole frames" in call("train", "video", clip, *vit, "--patch-frames", 2).line()
    line = call("train", "video", clip, *vit, "--code-size", 64).line()
    assert "[model] code_size has no effect unless model is dust or ut" in line
