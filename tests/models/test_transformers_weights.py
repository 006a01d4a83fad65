"""Folders of transformers models whose weights are not all there, or no numbers: refused, each with the first name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cdt_fast.errors import InputError
from cdt_fast.models.transformers_weights import load_complete
from tests.models.layer_loss_cases import classifier, language_model

CAUSAL, CLASSIFIER = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification


@pytest.fixture(params=["language model", "classifier"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    kind, model = (CAUSAL, language_model()) if request.param == "language model" else (CLASSIFIER, classifier())
    model.float().save_pretrained(tmp_path)
    return kind, tmp_path


def change(folder: Path, function: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    function(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("new_head", [False, True])
def test_a_missing_weight_of_the_base(saved: tuple[Any, Path], new_head: bool) -> None:
    kind, folder = saved
    missing = next(key for key in load_file(folder / "model.safetensors") if "layer" in key)
    change(folder, lambda weights: weights.pop(missing))
    with pytest.raises(InputError, match=rf"lacks 1 weights of a \w+, the first is {missing}"):
        load_complete(kind, folder, new_head=new_head)


def test_a_weight_of_another_shape(saved: tuple[Any, Path]) -> None:
    kind, folder = saved
    key = next(key for key in load_file(folder / "model.safetensors") if "layer" in key and key.endswith("weight"))
    change(folder, lambda weights: weights.update({key: torch.zeros(3, 3)}))
    with pytest.raises(InputError, match=f"has 1 weights of other shapes of a .*{key}"):
        load_complete(kind, folder, ignore_mismatched_sizes=True, new_head=True)


def test_a_new_head(tmp_path: Path) -> None:
    classifier().save_pretrained(tmp_path)
    change(
        tmp_path, lambda weights: [weights.pop(key) for key in list(weights) if "classifier" in key or "pooler" in key]
    )
    model = load_complete(CLASSIFIER, tmp_path, new_head=True)
    assert model.classifier.weight.isfinite().all()
    with pytest.raises(
        InputError, match=r"lacks 4 weights of a BertForSequenceClassification, the first is bert\.pooler"
    ):
        load_complete(CLASSIFIER, tmp_path)
    wider = load_complete(CLASSIFIER, tmp_path, new_head=True, num_labels=7, ignore_mismatched_sizes=True)
    assert wider.classifier.out_features == 7
    base = load_complete(transformers.AutoModel, tmp_path, new_head=True)  # without a head, all but the pooler is base
    assert isinstance(base, transformers.BertModel)
    change(tmp_path, lambda weights: weights.pop("bert.embeddings.word_embeddings.weight"))
    with pytest.raises(InputError, match=r"lacks 1 weights of a BertModel, the first is embeddings\.word_embeddings"):
        load_complete(transformers.AutoModel, tmp_path, new_head=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(saved: tuple[Any, Path], value: float) -> None:
    kind, folder = saved
    key = next(key for key in load_file(folder / "model.safetensors") if "layer" in key and key.endswith("weight"))
    change(folder, lambda weights: weights[key].view(-1)[2:3].fill_(value))
    with pytest.raises(InputError, match=f"1 of its tensors hold NaN or infinity, the first is {key}"):
        load_complete(kind, folder)


def test_code_in_a_folder_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "ran"
    (tmp_path / "code.py").write_text(
        "from pathlib import Path\n"
        f"Path({str(trace)!r}).touch()\n"
        "from transformers import LlamaConfig as Own, LlamaForCausalLM as OwnModel\n"
    )
    language_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    own = {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.OwnModel"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": own, "model_type": "own"}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_complete(CAUSAL, tmp_path)
    assert not trace.exists()


def test_weights_in_a_pickle_are_not_read(saved: tuple[Any, Path]) -> None:
    kind, folder = saved
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        load_complete(kind, folder, local_files_only=True)
