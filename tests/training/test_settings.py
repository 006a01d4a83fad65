from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cdt_fast.checks import InputError
from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.constraints.presets import PAPER_ROWS, PRESETS, options_of
from cdt_fast.tasks import TASKS, task_of
from cdt_fast.training.optimizer import build_constraints
from cdt_fast.training.settings import SECTIONS
from cdt_fast.video.settings import VideoSettings


def test_settings_come_back_from_toml(tmp_path: Path) -> None:
    config, path = VideoSettings(), tmp_path / "config.toml"
    config.update("constraints", {"rate": [0.1, 1e-9], "bounds": {12: "1.01x", 3: 0.9}, "betas": None})
    config.update("data", {"source": 'a "clip" = é\n\\.mp4', "gamma": [0.5, 25]})
    config.update("training", {"seed": 2**60})
    config.save(path)
    assert VideoSettings.load(path) == config


def test_a_validation_comes_when_training_saw_twice_its_samples_or_when_it_is_told() -> None:
    config = TASKS["text"].settings.chosen({"training": {"batch": 8, "accumulate": 2}})
    assert [config.validation_interval(samples) for samples in (1, 400, 401, 2500)] == [50, 50, 52, 314]
    config.update("training", {"validate_every": 7})
    assert config.validation_interval(2500) == 7


def of_preset(name: str, given: dict[str, dict[str, Any]] | None = None) -> Any:
    """The settings of a run that starts from a preset; one that fine-tunes is given a folder."""
    row = PAPER_ROWS.get(name)
    network = {"model": {row.pretrained: "folder"}} if row is not None and row.pretrained else {}
    return TASKS["video" if row is None else row.task].settings.chosen({**network, **(given or {})}, name)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_it_names_and_gives_way_to_what_is_beside_it(name: str) -> None:
    config = of_preset(name, {"constraints": {"dual_lr": 0.5, "rate": 0.125}})
    assert config.preset == name
    assert (config.constraints.rate, config.constraints.dual_lr) == (0.125, 0.5)
    for setting, value in options_of(name).items():
        if setting == "objective":
            assert config.objective == value
        elif setting not in ("rate", "dual_lr") and hasattr(config.constraints, setting):
            assert getattr(config.constraints, setting) == (list(value) if isinstance(value, tuple) else value)


# The paper's tables: task, network, layers, r, epsilon_0, how it enters, training noise, slack cost.
PAPER = [
    ("paper-dust", "video", "dust", 7, 0.75, 6.50, "constraint", 0.15, 10.0),
    ("paper-ut", "video", "ut", 7, 0.78, 5.50, "constraint", 0.15, 10.0),
    ("paper-vit", "video", "vit", 12, 0.71, 0.44, "constraint", 0.15, 10.0),
    ("paper-text-ut", "text", "text-ut", 3, 0.90, 0.90, "anchor", 0.8, 3.45),
    ("paper-encoder", "text", "folder", None, 0.774, 1.00, "anchor", 1.0, 1.07),
    ("paper-llama", "lm", "folder", None, 0.95, 12.0, "anchor", 0.0, 10.0),
]
PAPER_FOR_ALL = {"coupling": "chain", "normalize": False, "margin": 0, "betas": [0.9, 0.999], "dual_lr": 0.05}


@pytest.mark.parametrize("row", PAPER, ids=[row[0] for row in PAPER])
def test_a_preset_is_a_whole_row_of_the_paper(row: tuple[Any, ...]) -> None:
    name, task, network, layers, factor, reference, mode, gamma, slack_cost = row
    config = of_preset(name)
    chosen, data = config.constraints, config.data
    assert (config.task, config.model.model, data.gamma) == (task, network, gamma)
    assert layers is None or config.model.layers == layers
    assert chosen.rate == pytest.approx(1 - factor, rel=1e-12)
    assert (chosen.reference, chosen.reference_mode, chosen.slack_cost) == (reference, mode, slack_cost)
    assert {setting: getattr(chosen, setting) for setting in PAPER_FOR_ALL} == PAPER_FOR_ALL
    assert (config.constrained, config.objective, chosen.resilience, chosen.warmup_epochs) == (True, "last", "slack", 1)
    if task == "video":
        assert (data.frames, data.size, data.patch, data.patch_frames, data.window) == ("resized", 160, 16, 1, 20)
        assert config.sequence == ("space" if network == "vit" else "time")
        assert config.evaluation.gammas == [0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0]
    else:
        assert config.evaluation.gammas == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]
        assert getattr(config.model, "taps", None) is None
    if network in ("dust", "ut"):  # a dictionary a layer only under constraints
        shape = config.model.code_size, config.model.tied, config.model.scale, config.training.batch
        assert shape == (1024, None, 1, 32)
    alone = DescentConstraints.preset(name, layers or 6)  # pyright: ignore[reportArgumentType]
    assert build_constraints(config, layers or 6).get_extra_state() == alone.get_extra_state()


def test_a_preset_is_what_a_file_and_options_go_before(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('preset = "paper-ut"\n[model]\nlayers = 3\n[training]\nbatch = 4\n')
    config = VideoSettings.chosen({"training": {"batch": "2"}}, file=path)
    assert (config.preset, config.model.model, config.model.layers) == ("paper-ut", "ut", 3)
    assert (config.training.batch, config.constraints.rate) == (2, 0.22)
    assert VideoSettings.load(path).training.batch == 4
    config = VideoSettings.chosen({}, "paper-dust", path)
    assert (config.preset, config.model.model, config.model.layers) == ("paper-dust", "dust", 3)
    config.save(path)
    assert VideoSettings.load(path) == VideoSettings.chosen({}, "paper-dust", path) == config
    with pytest.raises(InputError, match="sets all settings, as a run's does, and --preset safe then none"):
        VideoSettings.chosen({}, "safe", path)


IDLE = "has no effect unless"
NO_CONSTRAINTS = {"constraints": {"constrained": False}}
BERT = {"model": {"model": "bert"}}
DEPTH_0 = "must not be of depth 0, which is the noisy input where grids overlap: nothing trains there"


@pytest.mark.parametrize(
    ("task", "preset", "given", "facts"),
    [
        # A setting without effect.
        ("text", None, {"constraints": {"coupling": "chain", "rate": "none"}}, [f"coupling {IDLE} rate is other than"]),
        ("video", None, {"constraints": {"rate": 0.1, "constrained": False}}, [f"rate {IDLE} constrained is true"]),
        ("video", None, {"constraints": {"margin": 0.1, "rate": "none", "bounds": "2=1"}}, [f"margin {IDLE} rate is"]),
        ("text", None, {"constraints": {"reference": 0.2, "rate": "none"}}, [f"reference {IDLE} rate is other than"]),
        ("lm", None, {"constraints": {"bounds": "2=1", "constrained": False}}, [f"bounds {IDLE} constrained is true"]),
        ("video", None, {"model": {"width": 64}}, [f"width {IDLE} model is vit"]),
        ("video", None, {"model": {"model": "vit", "code_size": 64}}, [f"code_size {IDLE} model is dust or ut"]),
        ("video", None, {"model": {"model": "vit", "pretrained": "x", "layers": 3}}, [f"layers {IDLE} pretrained"]),
        ("text", None, {"model": {"inner_pooling": "own"}}, [f"inner_pooling {IDLE} model is other than text-ut"]),
        ("text", None, {"model": {"taps": "0,3"}}, ["unknown key 'taps' in [model]"]),
        ("text", None, {"model": {"model": "x", "width": 3}}, [f"width {IDLE} model is text-ut"]),
        ("text", None, {"training": {"epochs": 3, "steps": 20}}, [f"[training] epochs {IDLE} steps is none"]),
        # Noise that nobody means.
        ("video", None, {"evaluation": {"gammas": "20,20"}}, ["gammas must be ascending noise levels, got [20.0"]),
        ("video", "paper-dust", {"data": {"gamma": 25}}, ["[data] gamma reaches 25 standard deviations"]),
        ("video", "paper-ut", {"data": {"gamma": "1,50"}}, ["frames crops it counts in gray levels of 0..255"]),
        ("video", None, {"data": {"gamma": 0.15}}, ["[data] gamma reaches 0.15 gray levels of 0..255"]),
        ("video", None, {"data": {"gamma": 300}}, ["must be 0.5 to 255; with frames resized it counts in"]),
        ("video", None, {"evaluation": {"gammas": "0.05,0.15"}}, ["[evaluation] gammas reaches 0.15 gray levels"]),
        ("video", None, {"data": {"gamma": 0}}, ["gamma is 0, and a network for crops works in units of the noise"]),
        # A bound where nothing trains.
        ("video", None, {"constraints": {"reference": 6.5, "reference_mode": "constraint"}}, [f"constraint {DEPTH_0}"]),
        ("video", None, {"constraints": {"bounds": "0=5"}}, [f"[constraints] bounds {DEPTH_0}"]),
        # What does not fit the network or the data.
        ("video", "paper-dust", {"data": {"size": 30}}, ["multiple of patch"]),
        ("video", None, {"constraints": {"rate": [0.1]}}, ["expected a number, or a sequence of 3"]),
        ("video", None, {"constraints": {"rate": 1.5}}, ["rate must be a number in [0, 1)"]),
        ("video", None, {"constraints": {"betas": [0.5]}}, ["betas"]),
        ("video", None, {"constraints": {"bounds": {17: 0.9}}}, ["depth 17, which is not read: the depths are 0 to "]),
        ("video", None, {"constraints": {"bounds": {2: "1.01y"}}}, ["a factor such as"]),
        ("video", "paper-dust", {"constraints": {"reference": None, "coupling": "absolute"}}, ["reference"]),
        ("text", None, {"constraints": {"rate": [0.5, 0.1]}}, ["expected a number, or a sequence of 3"]),
        ("text", None, {"constraints": {"bounds": {9: 1.0}}}, ["depth 9, which is not read"]),
        # The layers of a pretrained model are not known yet.
        ("text", None, {**BERT, "constraints": {"slack_cost": 0.0}}, ["slack_cost"]),
        ("text", None, {**BERT, "constraints": {"bounds": {9: -1.0}}}, ["bounds"]),
        ("text", None, {**BERT, "constraints": {"rate": [0.5, 1.0]}}, ["rate[1] must be", "[0, 1)"]),
        ("text", None, {**BERT, "constraints": {"rate": [0.5, 0.1, 0.1, 0.1]}}, ["no such file or folder"]),
        ("text", None, {**BERT, "constraints": {"bounds": {9: 1.0}}}, ["no such file or folder"]),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_any_data_are_read(
    task: str, preset: str | None, given: dict[str, dict[str, Any]], facts: list[str]
) -> None:
    def use() -> None:
        config = TASKS[task].settings.chosen(given, preset)
        config.data.source = "no such source"
        task_of(config).load(config)

    with pytest.raises(InputError) as caught:
        use()
    assert all(fact in str(caught.value) for fact in facts), caught.value


@pytest.mark.parametrize("entry", TASKS.values(), ids=TASKS)
def test_every_setting_has_one_name_and_every_condition_is_on_one(entry: Any) -> None:
    settings = entry.settings()
    names = [name for section in SECTIONS for name in type(getattr(settings, section)).model_fields]
    assert len(set(names)) == len(names) == len(settings.values())
    conditional = {name for _, _, part in settings.needs() for name in part.split()}
    assert conditional <= {*names}


def test_what_others_set_for_runs_of_both_kinds_is_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[constraints]\nrate = 0.2\nbetas = [0.0, 0.5]\n")
    assert VideoSettings.chosen(NO_CONSTRAINTS, file=path).constraints.rate == 0.2
    assert not VideoSettings.chosen(NO_CONSTRAINTS, "paper-dust").constrained
    path.write_text("[model]\nwidth = 64\n")
    assert VideoSettings.chosen({"model": {"model": "vit"}}, file=path).model.width == 64
    assert VideoSettings.chosen({"model": {"code_size": "none"}}).model.code_size is None


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("[model]\nlayer = 3\n", ["unknown key 'layer'", "[model]", "did you mean 'layers'?"]),
        ("[modle]\nlayers = 3\n", ["unknown section [modle]", "did you mean 'model'?"]),
        ("layers = 3\n", ["'layers' outside of a section"]),
        ('task = "text"\n', ["task"]),
        ('[model]\nlayers = "three"\n', ["[model] layers must be a valid integer", "got 'three'"]),
        ("[model]\nlayers = 2.5\n", ["layers must be a valid integer, got a number with a fractional"]),
        ("[model]\nlayers = 0\n", ["[model] layers must be greater than or equal to 1, got 0"]),
        ('[model]\nmodel = "dusty"\n', ["[model] model must be 'dust', 'ut' or 'vit', got 'dusty'"]),
        ("[training]\nlr = nan\n", ["[training] lr must be a finite number, got nan"]),
        ("[training]\nlr = -0.1\n", ["[training] lr must be greater than or equal to 0, got -0.1"]),
        ('preset = "paper-lm"\n', ["preset must be one of video, text, lm, safe, paper-dust", "got 'paper-lm'"]),
        ("preset = [3]\n", ["preset must be one of", "got [3]"]),
        ('preset = "paper-text-ut"\n', ["--preset paper-text-ut is of cdt-fast train text"]),
        ("[evaluation]\ngammas = []\n", ["gammas must have at least 1 item after validation"]),
        ("[evaluation]\ngammas = [0.1, inf]\n", ["[evaluation] gammas must be a finite number, got [0.1, inf]"]),
        ('[constraints]\nbounds = "1=1,01=2"\n', ["[constraints] bounds must name a depth once, got '1=1,01=2'"]),
        ('[constraints]\nbounds = "3:0.9"\n', ["bounds must be values by depth, as in 12=1.01x,3=0.9"]),
        ("[constraints]\ncoefficients = [1.0, 1.0]\n", ["unknown key 'coefficients' in [constraints]"]),
        ("[model\n", ["cannot be read as TOML"]),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it(tmp_path: Path, text: str, facts: list[str]) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        VideoSettings.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert all(fact in str(caught.value) for fact in facts)


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [
        ("reference", "auto", "auto"),
        ("reference", "2.5", 2.5),
        ("rate", "0.25,0.5", [0.25, 0.5]),
        ("constrained", False, False),
        ("rate", "none", None),
        ("bounds", "12=1.01x, 3=0.9", {12: "1.01x", 3: 0.9}),
    ],
)
def test_words_of_the_command_line_become_values(name: str, word: object, value: object) -> None:
    config = VideoSettings()
    config.set("constraints", name, word)
    assert getattr(config.constraints, name) == value
