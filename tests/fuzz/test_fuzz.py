"""The fuzzing itself: some cases of each op, and a wrong number that it must find."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch

from tests.fuzz import judge
from tests.fuzz.cases import CASES, Case, Chance
from tests.fuzz.wide import difference, nearest, widen


@pytest.mark.parametrize("op", CASES)
def test_some_cases(op: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about strides and sizes of zero
        kinds = {judge.judge(op, seed, "torch") for seed in range(60)}
    assert "compared" in kinds


@pytest.mark.parametrize("op", CASES)
def test_a_wrong_number_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = CASES[op]

    def wrong(chance: Chance, dtype: torch.dtype) -> Case:
        case = make(chance, dtype)
        return replace(case, op=lambda **given: [one * 1.0001 for one in case.op(**given)])

    monkeypatch.setitem(CASES, op, wrong)
    found = 0
    for seed in range(60):
        try:
            judge.judge(op, seed, "torch")
        except judge.Disagreement:
            found += 1
    assert found > 5


def test_a_wrong_choice_at_the_threshold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hard threshold that keeps a number which rounding does not bring above it."""
    make = CASES["lista_step"]

    def wrong(chance: Chance, dtype: torch.dtype) -> Case:
        case = make(chance, dtype)
        options = case.options | {"threshold": 1.3 * case.options["threshold"]}
        hard = options["nonlinearity"] == "hard_threshold"
        return replace(case, op=lambda **given: [case.call(**given, **options)]) if hard else case

    monkeypatch.setitem(CASES, "lista_step", wrong)
    found = []
    for seed in range(120):
        try:
            judge.judge("lista_step", seed, "torch")
        except judge.Disagreement as error:
            found.append(str(error))
    assert found
    assert all("the choice of what is above the threshold" in line for line in found)


def test_extended_precision_knows_more_than_float64() -> None:
    leaf = widen(torch.tensor([1.0, 2.0**-60, -1.0], dtype=torch.float64)).requires_grad_()
    (gradient,) = torch.autograd.grad([(leaf.exp() + leaf).sum()], [leaf], [widen(torch.ones(()).double())])
    assert nearest(leaf.sum()).item() == 2.0**-60
    rounded = torch.tensor([math.e + 1, 2.0, 1 / math.e + 1], dtype=torch.float64)
    assert 0 < difference(gradient, rounded).abs().max() < 1e-15
    assert difference(gradient, rounded)[1].item() == 2.0**-60
