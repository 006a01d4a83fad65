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


def test_extended_precision_knows_more_than_float64() -> None:
    leaf = widen(torch.tensor([1.0, 2.0**-60, -1.0], dtype=torch.float64)).requires_grad_()
    (gradient,) = torch.autograd.grad([(leaf.exp() + leaf).sum()], [leaf], [widen(torch.ones(()).double())])
    assert nearest(leaf.sum()).item() == 2.0**-60
    rounded = torch.tensor([math.e + 1, 2.0, 1 / math.e + 1], dtype=torch.float64)
    assert 0 < difference(gradient, rounded).abs().max() < 1e-15
    assert difference(gradient, rounded)[1].item() == 2.0**-60
