"""The layerwise cross-entropy: its products, the sample, errors."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast.checks import InputError
from tests.ops.battery import assert_close, build, call, results

module = importlib.import_module("cdt_fast.ops.layerwise_cross_entropy")  # the name in `ops` is the function
ALL = ("bias", "weights", "targets of depths")


# Products that are not needed are not computed


def products(monkeypatch: pytest.MonkeyPatch, *frozen: str, **options: Any) -> int:
    """How many matrix products of any size the forward and the backward make in one chunk a depth."""
    case = build("layerwise_cross_entropy", "bias", chunk_tokens=6, **options)
    case.options["targets"].clamp_(min=0)
    leaves = {name: tensor.requires_grad_(name not in frozen) for name, tensor in case.tensors.items()}
    count = 0
    mm, addmm = torch.mm, torch.addmm

    def counted(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Tensor:
            nonlocal count
            count += 1
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", counted(mm))
        patch.setattr(torch, "addmm", counted(addmm))
        total = call(case, leaves)[0]
        if total.requires_grad:
            total.backward()
    return count


def test_what_is_not_needed_costs_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    weighted = {"depth_weights": [1.0, 1.0, 1.0]}
    assert products(monkeypatch, **weighted) == 9
    assert products(monkeypatch, depth_weights=[1.0, 0.0, 1.0]) == 7
    assert products(monkeypatch, depth_weights=[0.0, 0.0, 0.0]) == 3
    assert products(monkeypatch, "h1", **weighted) == 8
    assert products(monkeypatch, "weight", "bias", **weighted) == 6
    assert products(monkeypatch, "weight", "bias", "h0", **weighted) == 5
    assert products(monkeypatch, "weight", "bias", "h0") == 5
    assert products(monkeypatch, "h0", "h1", "h2", "weight", "bias", **weighted) == 3
    assert products(monkeypatch) == 12


@pytest.mark.parametrize("extras", [("bias",), ALL])
@pytest.mark.parametrize("few", [{"FEW_NUMBERS": 0}, {"FEW_ROWS": 0, "FEW_BYTES": 0}, {}])
@pytest.mark.parametrize("multiple", [1, 64])
def test_a_classifier_of_many_rows(
    monkeypatch: pytest.MonkeyPatch, multiple: int, few: dict[str, int], extras: tuple[str, ...]
) -> None:
    """Its logits are swept with the classes first, and their gradients kept for the backward; as on a GPU its head is
    padded."""
    case = build("layerwise_cross_entropy", *extras, softcap=3.0, label_smoothing=0.1)
    case.tensors["weight"] = case.tensors["weight"][:3]
    case.tensors["bias"] = case.tensors["bias"][:3]
    for targets in case.options["targets"] if isinstance(case.options["targets"], list) else [case.options["targets"]]:
        targets.clamp_(max=2)
    expected = results(case)
    for name, value in {"COLUMN_MULTIPLE": {"cpu": multiple}, **few}.items():
        monkeypatch.setattr(module, name, value)
    assert_close(results(case), expected)


# Tokens beyond a bound are left out


@pytest.mark.parametrize("extras", [("bias", "weights"), ("targets of depths", "class weights")])
def test_a_bound_of_the_tokens_that_count(monkeypatch: pytest.MonkeyPatch, extras: tuple[str, ...]) -> None:
    """The head is given no more rows, also where the host does not know which tokens are ignored."""
    case = build("layerwise_cross_entropy", *extras, tokens=20, softcap=3.0)
    expected, rows, logits = results(case), [], module._Head.logits
    targets = case.options["targets"]
    most = max(int((each != -100).sum()) for each in (targets if isinstance(targets, list) else [targets]))
    monkeypatch.setattr(module, "_known", lambda targets: False)
    monkeypatch.setattr(module._Head, "logits", lambda head, x: rows.append(len(x)) or logits(head, x))
    assert_close(results(case), expected)
    case.options["max_tokens"] = most
    rows.clear()
    assert_close(results(case), expected)
    assert sum(rows) <= 2 * 3 * most
    case.options["max_tokens"] = 8
    assert call(case)[1].isnan().all()
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"hold \d+ tokens that count, more than max_tokens=8"):
        call(case)


# Errors


@pytest.mark.parametrize("extras", [(), ("targets of depths",)])
@pytest.mark.parametrize("wrong", [7, -1, 2**40])
def test_a_target_out_of_range(extras: tuple[str, ...], wrong: int) -> None:
    case = build("layerwise_cross_entropy", *extras, atoms=7)
    (case.options["targets"][1] if extras else case.options["targets"])[1, 2] = wrong
    name = r"targets\[1\]" if extras else "targets"
    with pytest.raises(InputError, match=rf"{name} must be in \[0, 7\) or -100 \(ignore_index\), got {wrong}"):
        call(case)


@pytest.mark.parametrize("extras", [(), ("weights",), ("targets of depths",)])
def test_a_mean_over_no_token(extras: tuple[str, ...]) -> None:
    own = "targets of depths" in extras
    for sizes in ({}, {"tokens": 0}, {"leading": (2, 0)}):
        case = build("layerwise_cross_entropy", *extras, **sizes)
        (case.options["targets"][1] if own else case.options["targets"]).fill_(-100)
        name = r"targets\[[01]\]" if own else "targets"
        with pytest.raises(InputError, match=rf"{name} must hold at least one token that is not -100 \(ignore_index\)"):
            call(case)
