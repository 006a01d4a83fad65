"""The fuzzing itself: some cases of each op, and a wrong number that it must find."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from tests.fuzz import judge
from tests.fuzz.cases import CASES, Case, Chance


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
        return replace(case, op=lambda **given: [one * 1.2 for one in case.op(**given)])

    monkeypatch.setitem(CASES, op, wrong)
    found = 0
    for seed in range(60):
        try:
            judge.judge(op, seed, "torch")
        except judge.Disagreement:
            found += 1
    assert found > 5
