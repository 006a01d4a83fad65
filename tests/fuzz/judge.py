"""What a case of an op is held to (see the package)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from tests.fuzz.cases import CASES, Case, Chance, Function

TIMES = 32
TIMES_TORCH = 8
TIMES_FLOAT64 = 64

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


def _run(function: Function, tensors: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients; the results' own gradients are eighths."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    outputs = list(function(**leaves))
    source = torch.Generator().manual_seed(7)
    upstream = [(torch.randint(-8, 9, one.shape, generator=source) / 8).to(one.dtype) for one in outputs]
    found = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True)
    gradients = [
        torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves.values(), strict=True)
    ]
    return [one.detach() for one in outputs], gradients


def _compared(case: Case, dtype: torch.dtype) -> str:
    try:
        outputs, gradients = _run(case.op, case.tensors)
    except InputError:
        return "refused"
    clean = {name: tensor.double() for name, tensor in case.tensors.items()}
    if case.padding is not None:
        for name in case.padded:
            clean[name] = clean[name].masked_fill(case.padding.unsqueeze(-1), 0.0)
    exact = _run(case.formula, clean)
    epsilon, limit = torch.finfo(dtype).eps, torch.finfo(dtype).max / 64
    if any(bool((one.abs() > limit).any()) or not bool(one.isfinite().all()) for part in exact for one in part):
        return "out of range"
    source = torch.Generator().manual_seed(11)
    moved = []
    for _ in range(2):
        signs = {name: torch.randint(0, 2, tensor.shape, generator=source) * 2 - 1 for name, tensor in clean.items()}
        moved.append(_run(case.formula, {name: clean[name] * (1 + epsilon * signs[name]) for name in clean}))
    names = [*(f"result {number}" for number in range(len(outputs))), *(f"gradient of {name}" for name in clean)]
    at_kink = case.kinks and any(not torch.equal(one[0][0] != 0, exact[0][0] != 0) for one in [(outputs,), *moved])
    found = [*outputs, *([] if at_kink else gradients)]
    largest = max((_largest(tensor) for tensor in clean.values()), default=0.0)
    for number, (name, mine) in enumerate(zip(names, found, strict=False)):
        truth, others = (exact[0] + exact[1])[number], [(one[0] + one[1])[number] for one in moved]
        if mine.shape != truth.shape:
            raise Disagreement(f"{name}: shape {tuple(mine.shape)} for {tuple(truth.shape)}")
        if not mine.isfinite().all():
            narrow = _run(case.formula, {name: tensor.to(dtype) for name, tensor in clean.items()})
            if not all(bool(one.isfinite().all()) for part in narrow for one in part):
                return "out of range"
            raise Disagreement(f"{name} is not finite where the formula is")
        change = max(_largest(other - truth) for other in others)
        # Below the normal numbers rounding is no longer relative.
        size = max(_largest(truth), largest if name.startswith("gradient") else 0.0)
        times = TIMES * (TIMES_FLOAT64 if dtype == torch.float64 else 1)
        bound = times * (change + epsilon * size + torch.finfo(dtype).smallest_normal * max(1.0, largest))
        error = _largest(mine.double() - truth)
        if error > bound:
            narrow = _run(case.formula, {name: tensor.to(dtype) for name, tensor in clean.items()})
            bound = TIMES_TORCH * _largest((narrow[0] + narrow[1])[number].double() - truth)
        if error > bound:
            raise Disagreement(f"{name} is off by {error:.3g}, bound {bound:.3g}, of {_largest(truth):.3g}, {dtype}")
    return "at a kink" if at_kink else "compared"


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
