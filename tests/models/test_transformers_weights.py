"""Folders of transformers models whose weights are not all there, or no numbers: refused, each with the first name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from cdt_fast.checks import InputError
from cdt_fast.models.transformers_weights import load_complete, named_errors
from tests.models.layer_loss_cases import build

KINDS = {"llama": transformers.AutoModelForCausalLM, "bert": transformers.AutoModelForSequenceClassification}


def saved(name: str, folder: Path, change: Callable[[dict[str, Tensor], str], Any] | None = None) -> str:
    """Save a model; `change` is given its weights and the name of one of a layer, which is returned."""
    build(name).float().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    key = next(key for key in weights if "layer" in key and key.endswith("weight"))
    if change is not None:
        change(weights, key)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return key


CHANGES: dict[str, tuple[Any, str]] = {
    "missing": (lambda weights, key: weights.pop(key), r"lacks 1 weights of a \w+, the first is {key}"),
    "shape": (lambda weights, key: weights.update({key: torch.zeros(3, 3)}), "has 1 weights of other shapes .*{key}"),
    "NaN": (lambda weights, key: weights[key].view(-1)[2:3].fill_(float("nan")), "1 of its tensors hold NaN .*{key}"),
    "inf": (lambda weights, key: weights[key].view(-1)[2:3].fill_(float("inf")), "1 of its tensors hold NaN .*{key}"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_of_the_base_that_cannot_be_used(change: str, tmp_path: Path) -> None:
    function, message = CHANGES[change]
    key = saved("bert", tmp_path, function)
    for new_head in (False, True):
        with pytest.raises(InputError, match=message.format(key=key)):
            load_complete(KINDS["bert"], tmp_path, new_head=new_head, ignore_mismatched_sizes=new_head)


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    saved("bert", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot be loaded as a transformers model"), named_errors(tmp_path, ""):
        load_complete(KINDS["bert"], tmp_path)


def test_a_new_head(tmp_path: Path) -> None:
    def without_head(weights: dict[str, Tensor], _: str) -> None:
        for key in [key for key in weights if "classifier" in key or "pooler" in key]:
            del weights[key]

    saved("bert", tmp_path, without_head)
    model = load_complete(KINDS["bert"], tmp_path, new_head=True)
    assert model.classifier.weight.isfinite().all()
    with pytest.raises(InputError, match=r"lacks 4 weights of a BertForSequenceClassification, .* bert\.pooler"):
        load_complete(KINDS["bert"], tmp_path)
    wider = load_complete(KINDS["bert"], tmp_path, new_head=True, num_labels=7, ignore_mismatched_sizes=True)
    assert wider.classifier.out_features == 7


def test_a_head_of_another_shape_for_as_many_classes(tmp_path: Path) -> None:
    saved("bert", tmp_path, lambda weights, _: weights.update({"classifier.weight": torch.zeros(2, 3)}))
    with pytest.raises(InputError, match=r"has 1 weights of other shapes of a Bert.*, the first is classifier\.weight"):
        load_complete(KINDS["bert"], tmp_path, new_head=True, ignore_mismatched_sizes=False)


def test_neither_code_nor_a_pickle_of_a_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path)
    path, trace = tmp_path / "config.json", tmp_path / "ran"
    config = json.loads(path.read_text())
    (tmp_path / "code.py").write_text(
        f"import pathlib\npathlib.Path({str(trace)!r}).touch()\n"
        "from transformers import LlamaConfig as Own, LlamaForCausalLM as OwnModel\n"
    )
    own = {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.OwnModel"}
    path.write_text(json.dumps({**config, "auto_map": own, "model_type": "own"}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_complete(KINDS["llama"], tmp_path)
    assert not trace.exists()
    path.write_text(json.dumps(config))
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        load_complete(KINDS["llama"], tmp_path, local_files_only=True)
