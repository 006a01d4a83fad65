"""A model in a folder: the round trip bit for bit, and one clear error for every way in which it can be broken."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cdt_fast import models
from cdt_fast.checks import InputError

SMALL: dict[str, Any] = {"patch_size": 4, "code_size": 9, "layers": 2}


def trained(kind: type[models.DUST], **options: Any) -> models.DUST:
    model = kind(**{**SMALL, **options})
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


CONFIGURATIONS = list(
    itertools.product(
        [models.DUST, models.VideoUT],
        [True, False],
        ["own", "next"],
        [{}, {"step": 1 / 3, "scale": 0.1}],
    )
)


@pytest.mark.parametrize(("kind", "tied", "readout", "extra"), CONFIGURATIONS)
def test_a_round_trip_is_bit_for_bit_the_same(
    tmp_path: Path, kind: type[models.DUST], tied: bool, readout: str, extra: dict[str, Any]
) -> None:
    model = trained(kind, tied=tied, readout=readout, **extra)
    model.save_pretrained(tmp_path / "a" / "model")
    noisy = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(1))
    for load in (kind.from_pretrained, models.load_pretrained, models.DUST.from_pretrained):
        loaded = load(tmp_path / "a" / "model")
        assert type(loaded) is kind
        assert loaded.config == model.config
        assert (loaded.step, loaded.threshold, loaded.scale) == (model.step, model.threshold, model.scale)
        assert loaded.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
        assert all(parameter.requires_grad for parameter in loaded.parameters())
        given = loaded.reconstructions(noisy)
        assert all(torch.equal(one, other) for one, other in zip(given, model.reconstructions(noisy), strict=True))


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


def test_a_subclass_s_folder_is_no_folder_of_another_class(saved: Path) -> None:
    with pytest.raises(InputError, match="holds a DUST, expected a VideoUT"):
        models.VideoUT.from_pretrained(saved)


def assert_refused(folder: Path, message: str) -> None:
    for load in (models.load_pretrained, models.DUST.from_pretrained):
        with pytest.raises(InputError, match=message):
            load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file(saved: Path, name: str) -> None:
    (saved / name).unlink()
    assert_refused(saved, rf"{name}: cannot be read")


def test_a_run_folder_names_its_model(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run / "model")
    (run / "config.toml").touch()
    assert_refused(run, f"{run}: is a run folder; its model is in {run / 'model'}$")


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_is_cut_short(saved: Path, name: str, fraction: float) -> None:
    whole = (saved / name).read_bytes()
    cut = int(len(whole) * fraction) if name == "model.safetensors" else min(int(len(whole) * fraction), len(whole) - 3)
    (saved / name).write_bytes(whole[:cut])
    assert_refused(saved, rf"{name}: cannot be read")


@pytest.mark.parametrize("model", ["Transformer", None, 3, ["DUST"], {"a": 1}])
def test_an_unknown_model(saved: Path, model: Any) -> None:
    change_config(saved, model=model)
    assert_refused(saved, r'config\.json: "model" must be one of .*DUST.*VideoUT')


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 8},
        {"layers": 0},
        {"layers": "2"},
        {"code_size": None},
        {"step": -1.0},
        {"step": "big"},
        {"sparsity": -0.1},
        {"readout": "other"},
        {"readout": None},
        {"nonlinearity": ["relu"]},
        {"initial_codes": "zero"},
    ],
)
def test_a_config_that_does_not_fit_its_model(saved: Path, changes: dict[str, Any]) -> None:
    change_config(saved, **changes)
    name = next(iter(changes))
    assert_refused(saved, rf"config\.json: does not fit DUST \(.*{name}")


@pytest.mark.parametrize("changes", [{"layers": 3}, {"code_size": 10}, {"patch_size": 9}, {"tied": True}])
def test_weights_that_do_not_fit_the_config(saved: Path, changes: dict[str, Any]) -> None:
    change_config(saved, **changes)
    assert_refused(saved, r"model\.safetensors: does not fit .*config\.json")


def of_another_tool(folder: Path, **changes: torch.Tensor) -> None:
    """The weights as another tool writes them, with `changes`."""
    save_file({**load_file(folder / "model.safetensors"), **changes}, folder / "model.safetensors")


def test_weights_of_another_model_of_the_same_shapes(saved: Path) -> None:
    other = saved / "other"
    trained(models.DUST, sparsity=0.9).save_pretrained(other)
    (other / "model.safetensors").replace(saved / "model.safetensors")
    assert_refused(saved, r"model\.safetensors: does not fit .*config\.json, which was another one")


@pytest.mark.parametrize("changes", [{"sparsity": 0.3}, {"step": 0.1}, {"scale": 1.5}, {"readout": "next"}])
def test_a_config_that_was_changed_since(saved: Path, changes: dict[str, Any]) -> None:
    change_config(saved, **changes)
    assert_refused(saved, r"config\.json, which was another one when it was saved")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(tmp_path: Path, value: float) -> None:
    model = trained(models.DUST)
    with torch.no_grad():
        model.dictionary[0, 1, 2] = value
    model.save_pretrained(tmp_path)
    assert_refused(tmp_path, r"model\.safetensors: 1 of its tensors hold NaN or infinity, the first is dictionary")


def test_weights_of_another_tool_load(saved: Path) -> None:
    before = models.load_pretrained(saved).state_dict()
    of_another_tool(saved)
    after = models.load_pretrained(saved).state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_of_the_weights_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    model = trained(models.DUST).to(dtype)
    model.save_pretrained(tmp_path)
    loaded = models.load_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
    assert all(parameter.dtype == dtype for parameter in loaded.parameters())
