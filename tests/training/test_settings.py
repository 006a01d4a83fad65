from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdt_fast.constraints.presets import PRESETS, options_of
from cdt_fast.errors import InputError
from cdt_fast.training.settings import SECTIONS
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
            if name != "preset":  # which sets others
                setattr(part, name, draw(values_of(hints[name])))
    return config


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(config=configs())
def test_any_settings_come_back_from_toml(config: VideoSettings, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("config") / "config.toml"
    config.save(path)
    assert VideoSettings.load(path) == config


def test_what_a_file_does_not_name_keeps_its_default(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[model]\nlayers = 3\n")
    expected = VideoSettings()
    expected.model.layers = 3
    assert VideoSettings.load(path) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_it_names_and_gives_way_to_what_is_beside_it(name: str) -> None:
    config = VideoSettings()
    config.update("constraints", {"dual_lr": 0.5, "rate": 0.125, "preset": name})
    assert config.constraints.rate == 0.125
    assert config.constraints.dual_lr == 0.5
    for setting, value in options_of(name).items():
        if setting == "objective":
            assert config.objective == value
        elif setting not in ("rate", "dual_lr") and hasattr(config.constraints, setting):
            assert getattr(config.constraints, setting) == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("[model]\nlayer = 3\n", ["unknown key 'layer'", "[model]", "did you mean 'layers'?"]),
        ("[modle]\nlayers = 3\n", ["unknown section [modle]", "did you mean 'model'?"]),
        ("[save]\nlayers = 3\n", ["unknown section [save]"]),
        ("layers = 3\n", ["'layers' outside of a section"]),
        ('task = "text"\n', ["task"]),
        ('[model]\nlayers = "three"\n', ["[model] layers must be a valid integer", "got 'three'"]),
        (
            "[model]\nlayers = 2.5\n",
            ["[model] layers must be a valid integer, got a number with a fractional part, got 2.5"],
        ),
        ("[model]\nlayers = true\n", ["[model] layers must not be true or false, got True"]),
        ("[model]\nlayers = 0\n", ["[model] layers must be greater than or equal to 1, got 0"]),
        ("[model]\nlayers = [1]\n", ["[model] layers must be a valid integer"]),
        ('[model]\nlayers = "none"\n', ["[model] layers must be a valid integer", "got 'none'"]),
        ('[model]\nmodel = "dusty"\n', ["[model] model must be 'dust', 'ut' or 'vit', got 'dusty'"]),
        ("[data]\nsource = 3\n", ["[data] source must be a valid string, got 3"]),
        ("[training]\nlr = nan\n", ["[training] lr must be a finite number, got nan"]),
        ("[training]\nlr = -inf\n", ["[training] lr must be a finite number, got -inf"]),
        (f"[training]\nlr = 1{'0' * 400}\n", ["[training] lr must be a valid number"]),
        ("[training]\nlr = -0.1\n", ["[training] lr must be greater than or equal to 0, got -0.1"]),
        ("[model]\nadaptive = 2\n", ["[model] adaptive must be a valid boolean", "got 2"]),
        (
            "[evaluation]\ngammas = []\n",
            ["[evaluation] gammas must have at least 1 item after validation, not 0, got []"],
        ),
        ("[evaluation]\ngammas = [0.1, -1.0]\n", ["[evaluation] gammas must be greater than or equal to 0"]),
        ("[evaluation]\ngammas = [0.1, inf]\n", ["[evaluation] gammas must be a finite number, got [0.1, inf]"]),
        ("[constraints]\nrate = [[0.1]]\n", ["[constraints] rate must be a valid number, got [[0.1]]"]),
        (
            "[constraints]\nbounds = 0.9\n",
            ["[constraints] bounds must be a valid dictionary, got 0.9"],
        ),
        (
            '[constraints]\nbounds = "3:0.9"\n',
            ["[constraints] bounds must be values by depth, as in 12=1.01x,3=0.9, got '3:0.9'"],
        ),
        ('[constraints]\nbounds = "last=0.9"\n', ["[constraints] bounds must be a valid integer", "got 'last=0.9'"]),
        (
            "[constraints]\ncoefficients = [1.0, -1.0]\n",
            ["[constraints] coefficients must be greater than or equal to 0"],
        ),
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


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    with pytest.raises(InputError, match="cannot be read as TOML"):
        VideoSettings.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read as TOML"):
        VideoSettings.load(path)


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [
        ("reference", "none", None),
        ("reference", "auto", "auto"),
        ("reference", "2.5", 2.5),
        ("rate", "0.25", 0.25),
        ("rate", "0.25,0.5", [0.25, 0.5]),
        ("preset", "none", None),
        ("resilience", "none", "none"),
        ("constrained", False, False),
        ("preset", "paper", "paper-video"),
        ("rate", "none", None),
        ("objective", "none", None),
        ("coefficients", "1,0,2", [1.0, 0.0, 2.0]),
        ("bounds", "12=1.01x, 3=0.9", {12: "1.01x", 3: 0.9}),
        ("reference_losses", "2,1.5", [2.0, 1.5]),
        ("reference_losses", "runs/a,b", "runs/a,b"),
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
        ({"step": -1.0}, "step"),
        ({"bounds": {7: 0.9}}, "depth 7, which is not read: the depths are 0 to 2"),
        ({"bounds": {2: "1.01y"}}, "a factor such as"),
        ({"objective": "log", "coefficients": [1.0]}, "coefficients must be 3 numbers"),
        ({"constrained": False, "coefficients": [1.0, 1.0, 1.0]}, "has none"),
    ]:
        config = tiny_config(**changes)
        config.data.source = "no such clip"
        with pytest.raises(InputError, match=fact):
            task_of(config).check(config)
