"""What a case of an op is held to (see the package)."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from tests.fuzz.cases import CASES, Case, Chance
from tests.fuzz.wide import nearest
from tests.fuzz.yardstick import Yardstick, run

# In place of an argument: what is no number, no tensor, not finite, or of another kind.
ODD: list[Any] = [None, "x", float("nan"), float("inf"), -1.0, 1e300, 10**400, [], [1.0, 2.0], True, object(), 2 + 1j]
ODD += [torch.ones(3), torch.ones(3).long(), torch.tensor(float("nan"), dtype=torch.float64), torch.ones(2, 2, 2, 2)]


class Disagreement(AssertionError):
    """What a case has found."""


def judge(op: str, seed: int, backend: str) -> str:
    """Try one case; returns what it was: "compared", "refused", "out of range", "at a kink", "planted", "odd".

    Raises:
        Disagreement: with its reason. Whatever else is raised is a finding too.
    """
    chance = Chance(f"{op} {seed}")
    dtype = chance.dtype(backend)
    case = CASES[op](chance, dtype)
    with contextlib.ExitStack() as limits:
        for name, size in case.limits.items():
            limits.enter_context(mock.patch(name, size))
        return _judge(case, chance, dtype)


def _judge(case: Case, chance: Chance, dtype: torch.dtype) -> str:
    kind = chance.random()
    if kind < 0.1:
        return _odd(case, chance)
    if case.padding is not None and kind < 0.4:
        for name in case.padded:
            tensor = case.tensors[name] = case.tensors[name].clone()
            tensor[case.padding] = chance.choice([float("nan"), float("inf"), -float("inf")])
    elif kind < 0.25 and case.samples and _several(case):
        return _planted(case, chance)
    return _compared(case, dtype)


def _odd(case: Case, chance: Chance) -> str:
    given: dict[str, Any] = {**case.tensors, **case.options}
    for _ in range(chance.randint(1, 2)):
        given[chance.choice(sorted(given))] = chance.choice(ODD)
    try:
        case.call(**given)
    except InputError:
        return "refused"
    return "odd"


def _several(case: Case) -> bool:
    return all(case.tensors[name].dim() > 2 and len(case.tensors[name]) > 1 for name in case.samples)


def _planted(case: Case, chance: Chance) -> str:
    """What is planted in the first sample does not reach the others."""
    try:
        clean = case.op(**case.tensors)
    except InputError:
        return "refused"
    name = chance.choice(case.samples)
    planted = case.tensors[name].clone()
    first = planted[0].reshape(-1)
    if not len(first):
        return "refused"
    first[chance.randrange(len(first))] = chance.choice([float("nan"), float("inf"), -float("inf")])
    planted[0] = first.view(planted[0].shape)
    for one, other in zip(clean, case.op(**case.tensors | {name: planted}), strict=True):
        if one.dim() and not torch.equal(one[1:].nan_to_num(1e30), other[1:].nan_to_num(1e30)):
            raise Disagreement("what is planted in a sample reaches another")
    return "planted"


def _compared(case: Case, dtype: torch.dtype) -> str:
    try:
        found = run(case.op, case.tensors)
    except InputError:
        return "refused"
    names = [f"result {number}" for number in range(len(found) - len(case.tensors))]
    names += [f"gradient of {name}" for name in case.tensors]
    if case.decided is not None and found[0].isfinite().all():
        case = _decided(case, found[0], dtype)
    yardstick = Yardstick(case, dtype)
    if yardstick.out_of_range():
        return "out of range"
    for number, (name, mine) in enumerate(zip(names, found, strict=True)):
        if mine.shape != yardstick.truth[number].shape:
            raise Disagreement(f"{name}: shape {tuple(mine.shape)} for {tuple(yardstick.truth[number].shape)}")
        if not mine.isfinite().all():
            if not all(bool(one.isfinite().all()) for one in yardstick.torchs):
                return "out of range"
            raise Disagreement(f"{name} is not finite where the formula is")
        excess = yardstick.excess(number, mine)
        if excess is not None:
            if case.kinks and name.startswith("gradient") and yardstick.at_kink(found[0]):
                return "at a kink"
            raise Disagreement(f"{name} is {excess}, {dtype}")
    return "compared"


def _decided(case: Case, result: Tensor, dtype: torch.dtype) -> Case:
    """The case with the result's own choice of what is kept in the formula.

    Raises:
        Disagreement: a choice that rounding does not explain: the number that the threshold was compared with would
            have to be off by more than the criterion allows.
    """
    assert case.decided is not None
    threshold, formula = case.decided
    kept = result != 0
    before = Yardstick(replace(case, formula=lambda **given: formula(torch.ones_like(kept))(**given)[:1]), dtype)
    value = nearest(before.truth[0])
    other = kept != (value.abs() > threshold)
    excess = before.excess(0, torch.where(other, value.sign() * threshold, value))
    if excess is not None and not before.out_of_range():
        raise Disagreement(f"the choice of what is above the threshold is {excess}, {dtype}")
    return replace(case, formula=formula(kept))
