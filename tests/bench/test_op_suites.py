"""The suites of ops: what can run agrees with the formula, and the floor is counted from the work."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cdt_fast.bench.case import ROLES, Case, Implementation, Step, Unavailable
from cdt_fast.bench.suites import attention, cross_entropy, ops
from cdt_fast.bench.suites.inputs import TOLERANCE, Inputs

CPU = torch.device("cpu")
SUITES = {"attention": attention, "ops": ops, "cross_entropy": cross_entropy}
CASES = [case for suite in SUITES.values() for case in suite.cases(CPU, "toy")]
OPTIONAL = ("FlexAttention", "xformers", "Liger", "CCE", "torch linear_cross_entropy")


def relative(found: list[Tensor], expected: list[Tensor]) -> float:
    assert [one.shape for one in found] == [other.shape for other in expected]
    differences = [
        torch.linalg.vector_norm(one.double() - other.double()) / torch.linalg.vector_norm(other.double())
        for one, other in zip(found, expected, strict=True)
    ]
    return torch.stack(differences).max().item()


def attempt(candidate: Implementation) -> Step | str:
    """The step, or why there is none."""
    try:
        return candidate.prepare()
    except Unavailable as reason:
        return str(reason)


def uncompiled(case: Case) -> Iterator[Implementation]:
    return (candidate for candidate in case.implementations if "torch.compile" not in candidate.name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_way_agrees_or_says_why_it_cannot_run(case: Case) -> None:
    expected = case.expected()
    assert all(torch.isfinite(tensor).all() for tensor in expected)
    ran = []
    for candidate in uncompiled(case):
        step = attempt(candidate)
        if isinstance(step, str):
            assert candidate.name.startswith(OPTIONAL)
            assert step
            assert "\n" not in step
            continue
        ran.append(candidate.role)
        difference = relative(step(), expected if candidate.expected is None else candidate.expected())
        # Rounding at this dtype: the gate has room, and it is not so wide that float32 would pass for anything.
        assert difference < case.tolerance / 2, (candidate.name, difference)
    assert {"eager", "ours"} <= set(ran)


@pytest.mark.parametrize(
    "suite", ["ops", *(pytest.param(suite, marks=pytest.mark.slow) for suite in ("attention", "cross_entropy"))]
)
def test_the_compiled_one(suite: str) -> None:
    case = next(SUITES[suite].cases(CPU, "toy"))
    (candidate,) = (candidate for candidate in case.implementations if "torch.compile" in candidate.name)
    step = attempt(candidate)
    if isinstance(step, str):
        pytest.skip(step)
    assert relative(step(), case.expected()) < case.tolerance / 2


def test_a_wrong_gradient_does_not_pass() -> None:
    case = next(attention.cases(CPU, "toy"))
    output, gradient = case.expected()
    assert relative([output, gradient * 1.001], [output, gradient]) > case.tolerance
    assert max(TOLERANCE.values()) < 0.05


@pytest.mark.parametrize("size", ["toy", "cpu", "gpu"])
@pytest.mark.parametrize("suite", SUITES)
def test_cases_cost_nothing_until_they_are_prepared(suite: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("tensors were made")

    monkeypatch.setattr(SUITES[suite], "normal", refuse)
    cases = list(SUITES[suite].cases(CPU, size))
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.suite == suite
        assert len({candidate.name for candidate in case.implementations}) == len(case.implementations)
        assert case.implementations[0].role == "eager"
        assert {candidate.role for candidate in case.implementations} <= set(ROLES)
        assert (case.flop > 0 and case.moved > 0) != ("against the last depth" in case.name)
    if size == "cpu" and suite == "cross_entropy":
        assert all("scaled down from" in case.note for case in cases if "classifier" not in case.name)
    with pytest.raises(AssertionError, match="tensors were made"):
        cases[0].implementations[0].prepare()


def test_implementations_share_their_inputs_and_the_last_step_frees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    make = attention.make_inputs

    def counting(*arguments: object) -> Inputs:
        inputs = make(*arguments)  # pyright: ignore[reportArgumentType]
        made.append(weakref.ref(inputs.leaves[0]))
        return inputs

    monkeypatch.setattr(attention, "make_inputs", counting)
    case = next(attention.cases(CPU, "toy"))
    steps: list[Step] = [
        candidate.prepare() for candidate in case.implementations if candidate.name in ("eager", "SDPA", "cdt_fast")
    ]
    first = steps[0]()
    assert len(made) == 1
    steps.clear()
    gc.collect()
    assert made[0]() is None
    again = case.implementations[0].prepare()()
    assert len(made) == 2
    assert all(torch.equal(one, other) for one, other in zip(again, first, strict=True))


def counted(step: Step) -> int:
    """FLOP of the matrix products that torch runs in a step."""
    step()
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def candidate(case: Case, name: str) -> Step:
    return next(candidate for candidate in case.implementations if candidate.name == name).prepare()


def test_flop_of_attention() -> None:
    for case in attention.cases(CPU, "toy"):
        eager = counted(candidate(case, "eager"))
        batch, tokens, width, values = (case.shape[name] for name in ("B", "T", "d", "k"))
        if "padded" in case.name:
            assert case.flop < eager  # eager multiplies padding, too
            continue
        product = 2 * batch * tokens**2
        if tokens <= width:  # eager multiplies the gradient of the scores with the tokens twice
            assert case.flop == eager - product * width
        else:
            assert case.flop == eager + product * min(width, values)


def test_flop_of_attention_of_padded_sequences() -> None:
    shape = attention.Shape(3, 7, 8, padded=True)
    (lengths,) = attention.make_inputs(shape, torch.float32, CPU).others
    assert lengths.tolist() == attention.lengths_of(shape)
    assert min(lengths.tolist()) < 7
    one_each = [attention.flop(attention.Shape(1, length, 8)) for length in lengths.tolist()]
    assert attention.flop(shape) == sum(one_each)


@pytest.mark.parametrize("name", ["lista_step", "unrolled_layer", "residual_linear"])
def test_flop_of_ops(name: str) -> None:
    case = next(case for case in ops.cases(CPU, "toy") if case.name.startswith(name))
    cheapest = "eager by the identity" if name == "unrolled_layer" else "eager"
    assert case.flop == counted(candidate(case, cheapest))
    if name == "unrolled_layer":
        assert case.flop < counted(candidate(case, "eager"))


def test_flop_of_cross_entropy() -> None:
    for case in cross_entropy.cases(CPU, "toy"):
        if "against the last depth" in case.name:
            assert case.flop == case.moved == 0  # its implementations do not do the same work
        else:
            assert case.flop == pytest.approx(counted(candidate(case, "eager, a depth at a time")))


WITH_FLOOR = [case for case in CASES if "padded" not in case.name and case.moved]


@pytest.mark.parametrize("case", WITH_FLOOR, ids=lambda case: case.name)
def test_bytes(case: Case) -> None:
    """The results of a step, and what it reads: an input for every gradient, and what else there is."""
    results = candidate(case, case.implementations[0].name)()
    sizes = {name: int(count) for name, count in case.shape.items()}
    itemsize = getattr(torch, case.dtype).itemsize
    if case.suite == "cross_entropy":
        gradients = sum(tensor.numel() for tensor in results[1:])
        assert case.moved == 2 * itemsize * gradients + 8 * sizes["N"]
        return
    numbers = sum(tensor.numel() for tensor in results if tensor.dim())
    rows = sizes["B"] * sizes["T"]
    if case.name.startswith("layerwise_reconstruction_loss"):
        numbers += numbers + rows * sizes["n"]  # the reconstructions and their target
    else:
        numbers *= 2  # an input for every gradient, an upstream gradient for every output
        numbers += rows * sizes["n"] if case.name.startswith("unrolled_layer") else 0  # the target
    assert case.moved == itemsize * numbers
