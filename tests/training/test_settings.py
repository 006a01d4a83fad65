from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.constraints.presets import PAPER_ROWS, PRESETS, options_of
from cdt_fast.errors import InputError
from cdt_fast.tasks import TASKS
from cdt_fast.training.factory import build_constraints, check_trained_depths
from cdt_fast.training.settings import GONE, SECTIONS, RunSettings
from cdt_fast.video.settings import VideoSettings
from tests.runs import task_of


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values that a field may take, as TOML has them."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        parts = [part for bound in inner[1:] for part in [bound, *bound.metadata]]
        least = max((part.ge for part in parts if hasattr(part, "ge")), default=0)
        most = min((part.le for part in parts if hasattr(part, "le")), default=1e300)
        below = min((part.lt for part in parts if hasattr(part, "lt")), default=float("inf"))
        above = max((part.gt for part in parts if hasattr(part, "gt")), default=-float("inf"))
        values = st.floats(least, min(most, below), allow_nan=False) if inner[0] is float else values_of(inner[0])
        return values.filter(lambda value: isinstance(value, list | dict) or (least <= value < below and value > above))
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is dict:
        return st.dictionaries(values_of(inner[0]), values_of(inner[1]), min_size=1, max_size=3)
    if origin is list:
        return st.lists(values_of(inner[0]), min_size=1, max_size=5)
    if inner:
        return st.one_of(*map(values_of, inner))
    return {
        int: st.integers(0, 2**60),
        float: st.floats(0, 1e300, allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        str: st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(_is_a_word),
        type(None): st.none(),
    }[annotation]


def _is_a_word(text: str) -> bool:
    """Not what a setting reads as None or as numbers, and so never holds as text."""
    try:
        list(map(float, text.split(",")))
    except ValueError:
        return text != "none"
    return False


@st.composite
def configs(draw: st.DrawFn) -> VideoSettings:
    config = VideoSettings()
    for section in SECTIONS:
        part = getattr(config, section)
        hints = get_type_hints(type(part), include_extras=True)
        for name in type(part).model_fields:
            setattr(part, name, draw(values_of(hints[name])))
    return config


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(config=configs())
def test_any_settings_come_back_from_toml(config: VideoSettings, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("config") / "config.toml"
    config.save(path)
    assert VideoSettings.load(path) == config


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
PAPER_FOR_ALL = {"coupling": "chain", "normalize": False, "margin": 0, "betas": [0.9, 0.999]}


@pytest.mark.parametrize(
    ("name", "task", "network", "layers", "factor", "reference", "mode", "gamma", "slack_cost"),
    PAPER,
    ids=[row[0] for row in PAPER],
)
def test_a_preset_is_a_whole_row_of_the_paper(
    name: str,
    task: str,
    network: str,
    layers: int | None,
    factor: float,
    reference: float,
    mode: str,
    gamma: float,
    slack_cost: float,
) -> None:
    config = of_preset(name)
    assert (config.task, config.model.model, config.data.gamma) == (task, network, gamma)
    assert layers is None or config.model.layers == layers
    chosen = config.constraints
    assert chosen.rate == pytest.approx(1 - factor, rel=1e-12)
    assert (chosen.reference, chosen.reference_mode, chosen.slack_cost) == (reference, mode, slack_cost)
    assert {setting: getattr(chosen, setting) for setting in PAPER_FOR_ALL} == PAPER_FOR_ALL
    assert (config.constrained, config.objective, chosen.resilience, chosen.warmup_epochs) == (True, "last", "slack", 1)
    if task == "video":
        data = config.data
        assert (data.frames, data.size, data.patch, data.patch_frames, data.window) == ("resized", 160, 16, 1, 20)
        assert (data.unit, data.overlap) == ("deviation", 1)
        assert data.sequence == ("space" if network == "vit" else "time")
        assert config.evaluation.gammas == [0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0]
        assert not config.adaptive
    else:
        assert config.evaluation.gammas == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]
        assert getattr(config.model, "taps", None) is None
    if network in ("dust", "ut"):
        assert (config.model.code_size, config.model.tied) == (1024, None), (
            "a dictionary a layer only under constraints"
        )
        assert (config.model.scale, config.training.batch) == (1, 32)
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
    assert VideoSettings.load(path) == VideoSettings.chosen({}, file=path) == config


def test_files_of_earlier_runs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[data]\nsetup = "denoiser"\nwindow = 16\n[constraints]\npreset = "none"\n')
    expected = VideoSettings()
    expected.data.window = 16
    assert VideoSettings.load(path) == expected


IDLE = "has an effect only with"
NO_CONSTRAINTS = {"constraints": {"constrained": False}}
DEPTH_0 = "must not be of depth 0, which is the noisy input where grids overlap: nothing trains there"


@pytest.mark.parametrize(
    ("task", "given", "fact"),
    [
        ("text", {"constraints": {"coupling": "chain", "rate": "none"}}, f"coupling {IDLE} rate other than none"),
        ("video", {"constraints": {"rate": 0.1, "constrained": False}}, f"rate {IDLE} constrained true"),
        ("lm", {"constraints": {"bounds": "2=1", "constrained": False}}, f"bounds {IDLE} constrained true"),
        ("video", {"data": {"stride": 4}}, f"[data] stride {IDLE} frames resized, and frames is crops"),
        ("video", {"model": {"width": 64}}, f"width {IDLE} model vit, and model is dust"),
        ("video", {"model": {"model": "vit", "code_size": 64}}, f"code_size {IDLE} model dust or ut, and model is vit"),
        ("video", {"model": {"model": "vit", "pretrained": "x", "layers": 3}}, f"layers {IDLE} pretrained none"),
        ("text", {"model": {"taps": "0,3"}}, f"taps {IDLE} model other than text-ut"),
        ("text", {"model": {"model": "x", "width": 3}}, f"width {IDLE} model text-ut, and model is x"),
        ("text", {"training": {"epochs": 3, "steps": 20}}, f"[training] epochs {IDLE} steps none, and steps is 20"),
    ],
)
def test_a_setting_without_effect_is_refused_where_it_is_given(
    task: str, given: dict[str, dict[str, Any]], fact: str
) -> None:
    with pytest.raises(InputError) as caught:
        TASKS[task].settings.chosen(given)
    assert fact in str(caught.value)


def test_a_setting_without_effect_is_refused_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[data]\nstride = 4\n")
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}: \[data\] stride {IDLE} frames resized"):
        VideoSettings.chosen({}, file=path)
    config = VideoSettings.chosen(NO_CONSTRAINTS)
    config.save(path)  # names all: what differs from the defaults counts as given
    assert VideoSettings.chosen({}, file=path) == config
    config.constraints.dual_lr = 0.1
    config.save(path)
    with pytest.raises(InputError, match=f"dual_lr {IDLE} constrained true"):
        VideoSettings.chosen({}, file=path)


@pytest.mark.parametrize("entry", TASKS.values(), ids=TASKS)
def test_every_condition_is_on_a_setting_that_there_is(entry: Any) -> None:
    settings = entry.settings()
    for section in SECTIONS:
        for name in type(getattr(settings, section)).model_fields:
            settings._unmet((section, name))


def test_what_others_set_for_runs_of_both_kinds_is_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[constraints]\nrate = 0.2\nbetas = [0.0, 0.5]\n")
    assert VideoSettings.chosen(NO_CONSTRAINTS, file=path).constraints.rate == 0.2
    assert not VideoSettings.chosen(NO_CONSTRAINTS, "paper-dust").constrained
    path.write_text("[data]\nstride = 4\n")
    assert VideoSettings.chosen({"data": {"frames": "resized"}}, file=path).data.stride == 4
    assert VideoSettings.chosen({"data": {"stride": "none"}}).data.stride is None


@pytest.mark.parametrize(
    ("given", "preset", "facts"),
    [
        (
            {"data": {"unit": "deviation"}},
            None,
            ["[data] unit is deviation", "for unit level", "gamma [1.0, 50.0]", "gammas [5.0"],
        ),
        ({"data": {"unit": "deviation", "gamma": 0.1}}, None, ["numbers for unit level: gammas [5.0"]),
        ({"data": {"unit": "level", "gamma": 25}}, "paper-dust", ["numbers for unit deviation: gammas [0.05"]),
        ({"model": {"adaptive": True}}, "paper-dust", ["adaptive is True", "sparsity 0.2, reference 6.5"]),
    ],
)
def test_a_unit_does_not_change_under_a_number(
    tmp_path: Path, given: dict[str, dict[str, Any]], preset: str | None, facts: list[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps({**({} if preset is None else {"preset": preset}), **given}))
    for make in (lambda: VideoSettings.chosen(given, preset), lambda: VideoSettings.chosen({}, file=path)):
        with pytest.raises(InputError) as caught:
            make()
        assert all(fact in str(caught.value) for fact in facts), caught.value
    both = {"data": {"unit": "deviation", "gamma": 0.1}, "evaluation": {"gammas": [0.1]}}
    assert VideoSettings.chosen(both).data.unit == "deviation"


@pytest.mark.parametrize(
    ("task", "given", "preset", "fact"),
    [
        ("video", {"data": {"gamma": 25}}, "paper-dust", "[data] gamma reaches 25 standard deviations"),
        ("video", {"data": {"gamma": "1,50"}}, "paper-ut", "unit level it counts in gray levels of 0..255"),
        ("video", {"data": {"gamma": 0.15}}, None, "[data] gamma reaches 0.15 gray levels of 0..255"),
        ("video", {"data": {"gamma": 300}}, None, "must be 0.5 to 255; with unit deviation it counts in"),
        ("video", {"evaluation": {"gammas": "0.05,0.15"}}, None, "[evaluation] gammas reaches 0.15 gray levels"),
        (
            "video",
            {"data": {"gamma": 0}},
            None,
            "[data] gamma is 0, and an adaptive network works in units of the noise",
        ),
        ("text", {"evaluation": {"gammas": "0,25"}}, None, "[evaluation] gammas reaches 25 standard deviations"),
    ],
)
def test_noise_that_nobody_means_is_refused(
    task: str, given: dict[str, dict[str, Any]], preset: str | None, fact: str
) -> None:
    config: RunSettings = TASKS[task].settings.chosen(given, preset)
    config.data.source = "no such source"
    with pytest.raises(InputError) as caught:
        task_of(config).check(config)
    assert fact in str(caught.value)


@pytest.mark.parametrize(
    ("task", "given", "fact"),
    [
        (
            "video",
            {"reference": 6.5, "reference_mode": "constraint"},
            f"[constraints] reference_mode constraint {DEPTH_0}",
        ),
        ("video", {"bounds": "0=5"}, f"[constraints] bounds {DEPTH_0}"),
        (
            "lm",
            {"bounds": "0=5"},
            "bounds must not be of depth 0, whose embeddings and head lora_rank leaves as they are",
        ),
    ],
)
def test_depth_0_has_no_weight_or_bound_where_nothing_trains_it(task: str, given: dict[str, Any], fact: str) -> None:
    model = {"model": "folder", "lora_rank": 4} if task == "lm" else {}
    config = TASKS[task].settings.chosen({"model": model, "constraints": given})
    with pytest.raises(InputError, match=re.escape(fact)):
        check_trained_depths(config)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("[model]\nlayer = 3\n", ["unknown key 'layer'", "[model]", "did you mean 'layers'?"]),
        ("[modle]\nlayers = 3\n", ["unknown section [modle]", "did you mean 'model'?"]),
        ("layers = 3\n", ["'layers' outside of a section"]),
        ('task = "text"\n', ["task"]),
        ('[model]\nlayers = "three"\n', ["[model] layers must be a valid integer", "got 'three'"]),
        (
            "[model]\nlayers = 2.5\n",
            ["[model] layers must be a valid integer, got a number with a fractional part, got 2.5"],
        ),
        ("[model]\nlayers = 0\n", ["[model] layers must be greater than or equal to 1, got 0"]),
        ('[model]\nmodel = "dusty"\n', ["[model] model must be 'dust', 'ut' or 'vit', got 'dusty'"]),
        ("[training]\nlr = nan\n", ["[training] lr must be a finite number, got nan"]),
        ("[training]\nlr = -0.1\n", ["[training] lr must be greater than or equal to 0, got -0.1"]),
        ("[training]\nsteps = 0\n", ["[training] steps must be greater than or equal to 1, got 0"]),
        ('[data]\nsetup = "paper"\n', ["[data] setup is gone", "--preset paper-dust, paper-ut"]),
        ("[training]\njacobian = 1.0\n", ["[training] jacobian is gone", "the git tag full (commit 1178e39)"]),
        ('[constraints]\npreset = "safe"\n', ["[constraints] preset is gone", 'preset = "…"']),
        ('preset = "paper-lm"\n', ["preset must be one of video, text, lm, safe, paper-dust", "got 'paper-lm'"]),
        ("preset = [3]\n", ["preset must be one of", "got [3]"]),
        ('preset = "paper-text-ut"\n', ["--preset paper-text-ut is of cdt-fast train text"]),
        (
            "[evaluation]\ngammas = []\n",
            ["[evaluation] gammas must have at least 1 item after validation, not 0, got []"],
        ),
        ("[evaluation]\ngammas = [0.1, inf]\n", ["[evaluation] gammas must be a finite number, got [0.1, inf]"]),
        (
            '[constraints]\nbounds = "3:0.9"\n',
            ["[constraints] bounds must be values by depth, as in 12=1.01x,3=0.9, got '3:0.9'"],
        ),
        ("[constraints]\ncoefficients = [1.0, 1.0]\n", ["[constraints] coefficients is gone: the git tag full"]),
        ("[model\n", ["cannot be read as TOML"]),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it(tmp_path: Path, text: str, facts: list[str]) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        VideoSettings.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    for fact in facts:
        assert fact in message


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


def test_settings_that_do_not_fit_each_other_are_found_without_data(tiny_config: Callable[..., VideoSettings]) -> None:
    task_of(tiny_config()).check(tiny_config())
    for changes, fact in [
        ({"size": 30}, "multiple of patch"),
        ({"rate": [0.1]}, "2"),
        ({"rate": 1.5}, "rate"),
        ({"reference": None, "coupling": "absolute"}, "reference"),
        ({"betas": [0.5]}, "betas"),
        ({"bounds": {7: 0.9}}, "depth 7, which is not read: the depths are 0 to 2"),
        ({"bounds": {2: "1.01y"}}, "a factor such as"),
    ]:
        config = tiny_config(**changes)
        config.data.source = "no such clip"
        with pytest.raises(InputError, match=fact):
            task_of(config).check(config)


def test_a_file_of_an_older_run_is_read_where_what_is_gone_did_nothing(tmp_path: Path) -> None:
    idle = "\n".join(f"{name} = {json.dumps(values[0])}" for name, values in GONE.items())
    (tmp_path / "config.toml").write_text(f"[training]\n{idle}\n")
    assert VideoSettings.load(tmp_path / "config.toml") == VideoSettings()
