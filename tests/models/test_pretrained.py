"""A model in a folder: the round trip bit for bit, and one clear error for every way in which it can be broken."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cdt_fast import models
from cdt_fast.checks import InputError

SMALL: dict[str, Any] = {"patch_size": 4, "code_size": 9, "layers": 2}


def trained(kind: Any, **options: Any) -> Any:
    model = kind(**({**SMALL, **options} if issubclass(kind, models.DUST) else options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trained(models.DUST).save_pretrained(tmp_path)
    return tmp_path


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_refused(folder: Path, message: str) -> None:
    for load in (models.load_pretrained, models.DUST.from_pretrained):
        with pytest.raises(InputError, match=message):
            load(folder)


WORDS = {"embedding": (11, 6), "classes": 3, "layers": 2}
PICTURES = {"patch_size": 4, "grid": (2, 3), "layers": 2, "width": 12, "heads": 3, "feedforward_width": 7}
KINDS: list[tuple[Any, dict[str, Any]]] = [
    *((kind, options) for kind in (models.DUST, models.VideoUT) for options in ({}, {"tied": True})),
    (models.DUST, {"readout": "next", "step": 1 / 3, "scale": 0.1}),
    *((models.TextUT, {**WORDS, **options}) for options in ({}, {"width": 9, "tied": True, "scale": 0.3})),
    (models.DenoisingViT, PICTURES),
    (models.DUST, {"layers": np.int64(2), "scale": np.float64(0.1)}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_round_trip_is_bit_for_bit_the_same(
    tmp_path: Path, kind: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = trained(kind, **options).to(dtype).eval()
    model.save_pretrained(tmp_path / "a" / "model")
    generator = torch.Generator().manual_seed(1)
    given = torch.rand(2, 6, 4, generator=generator).to(dtype)
    if kind is models.TextUT:
        given = torch.randint(11, (2, 6), generator=generator)
    for load in (kind.from_pretrained, models.load_pretrained):
        loaded = load(tmp_path / "a" / "model").eval()
        assert type(loaded) is kind
        assert loaded.config == model.config
        assert loaded.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
        assert all(parameter.requires_grad and parameter.dtype == dtype for parameter in loaded.parameters())
        assert torch.equal(loaded(given), model(given))


def test_the_model_of_a_run_is_not_replaced_by_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, model = tmp_path / "run", trained(models.VideoUT)
    trained(models.DUST).save_pretrained(run / "model")
    (run / "config.toml").write_text('task = "video"')
    (tmp_path / "link").symlink_to(run / "model")
    monkeypatch.chdir(run / "model")
    for folder in (run / "model", tmp_path / "link", "."):
        with pytest.raises(InputError, match=r"is where a run keeps its model; .*overwrite=True"):
            model.save_pretrained(folder)
    assert isinstance(models.load_pretrained(run / "model"), models.DUST)
    model.save_pretrained(run / "another")
    model.save_pretrained(run / "model", overwrite=True)
    assert isinstance(models.load_pretrained(run / "model"), models.VideoUT)


def test_a_parametrized_model_is_not_saved(tmp_path: Path) -> None:
    model = trained(models.DUST)
    torch.nn.utils.parametrizations.weight_norm(model, "dictionary")
    with pytest.raises(InputError, match=re.escape("parametrizations: call torch.nn.utils.parametrize.remove_")):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_class_or_of_a_run(saved: Path) -> None:
    with pytest.raises(InputError, match="holds a DUST, expected a VideoUT"):
        models.VideoUT.from_pretrained(saved)
    run = saved / "run"
    shutil.copytree(saved, run / "model")
    (run / "config.toml").touch()
    assert_refused(run, f"{run}: is a run folder; its model is in {run / 'model'}$")


@pytest.mark.parametrize("fraction", [None, 0.0, 0.01, 0.3, 0.999])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_is_missing_or_cut_short(saved: Path, name: str, fraction: float | None) -> None:
    whole = (saved / name).read_bytes()
    (saved / name).unlink()
    if fraction is not None:
        (saved / name).write_bytes(whole[: min(int(len(whole) * fraction), len(whole) - 3)])
    assert_refused(saved, rf"{name}: cannot be read")


CONFIGS: list[tuple[dict[str, Any], str]] = [
    *(({"model": model}, '"model" must be one of .*DUST.*VideoUT') for model in ("Transformer", None, ["DUST"])),
    *(
        (changes, rf"does not fit DUST \(.*{next(iter(changes))}")
        for changes in (
            {"heads": 8},
            {"layers": "2"},
            {"code_size": None},
            {"step": -1.0},
            {"readout": "shared"},
            {"nonlinearity": ["relu"]},
            {"initial_codes": "zero"},
        )
    ),
]


@pytest.mark.parametrize(("changes", "message"), CONFIGS)
def test_a_config_that_does_not_fit_its_model(saved: Path, changes: dict[str, Any], message: str) -> None:
    change_config(saved, **changes)
    assert_refused(saved, rf"config\.json: {message}")


@pytest.mark.parametrize("changes", [{"layers": 3}, {"code_size": 10}, {"tied": True}])
def test_weights_of_another_config(saved: Path, changes: dict[str, Any]) -> None:
    change_config(saved, **changes)
    assert_refused(saved, r"model\.safetensors: does not fit .*config\.json")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite(tmp_path: Path, value: float) -> None:
    model = trained(models.DUST)
    with torch.no_grad():
        model.dictionary[0, 1, 2] = value
    model.save_pretrained(tmp_path)
    assert_refused(tmp_path, r"model\.safetensors: 1 of its tensors hold NaN or infinity, the first is dictionary")
