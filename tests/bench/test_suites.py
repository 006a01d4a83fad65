"""The suites: whatever can run agrees with the formula, and what is missing is a reason in one line."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast.bench.case import Case, Step, Unavailable
from cdt_fast.bench.measure import disagreement
from cdt_fast.bench.run import SUITES
from cdt_fast.bench.suites import attention, cross_entropy, ops, support
from cdt_fast.bench.suites.step import Work

CPU = torch.device("cpu")
CASES = [case for suite in SUITES.values() for case in suite(CPU, "toy")]
OPTIONAL = ("torch.compile", "FlexAttention", "xformers", "Liger", "CCE", "QuACK", "torch linear_cross_entropy")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_implementation_agrees_or_says_why_it_cannot_run(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdt_fast.bench.suites.step.cpu_has_bf16_products", lambda: True)
    assert case.tolerance < 0.05
    ran, missing = [], []
    for one in case.implementations:
        try:
            step = one.prepare()
        except Unavailable as reason:
            missing.append((one.name, str(reason)))
            continue
        ran.append(one.role)
        for _ in range(2):  # every call is the first one again
            found = disagreement(step(), case.expected())
            # Rounding at this dtype: there is room, and not so much that float32 would pass for anything.
            assert found < case.tolerance / 2, (one.name, found)
    assert {"eager", "ours"} <= set(ran)
    assert all(name.startswith(OPTIONAL) and "\n" not in reason for name, reason in missing), missing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "sizes"), [("attention", attention.SHAPES), ("ops", ops.SIZES), ("cross_entropy", cross_entropy.SHAPES)]
)
def test_the_compiled_one(suite: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sizes, "cpu", sizes["toy"])
    case = next(SUITES[suite](CPU, "cpu"))
    (one, *_) = (one for one in case.implementations if one.name == "torch.compile")
    try:
        step = one.prepare()
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert disagreement(step(), case.expected()) < case.tolerance / 2


@pytest.mark.parametrize("size", ["toy", "cpu", "gpu"])
@pytest.mark.parametrize("suite", SUITES)
def test_cases_cost_nothing_until_they_are_prepared(suite: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("tensors were made")

    monkeypatch.setattr(Work, "build", refuse)
    monkeypatch.setattr(support, "seeded", refuse)
    cases = list(SUITES[suite](CPU, size))
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.suite == suite
        assert len({one.name for one in case.implementations}) == len(case.implementations)
        assert case.implementations[0].role == "eager"
        assert {one.role for one in case.implementations} <= {"eager", "peer", "ours"}
    with pytest.raises(AssertionError, match="tensors were made"):
        cases[0].implementations[0].prepare()


def test_implementations_share_their_inputs_and_the_last_step_frees_them() -> None:
    inputs = support.shared(lambda: support.Inputs([torch.ones(1)], [], []))
    first, second = inputs(), inputs()
    assert first is second
    leaf = weakref.ref(first.leaves[0])
    del first, second
    assert leaf() is None


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """Put a package into the place of one that needs a GPU."""
    module = ModuleType(name)
    vars(module).update(contents)
    for parent in (name.rpartition(".")[0], name):
        if parent:
            monkeypatch.setitem(sys.modules, parent, module if parent == name else ModuleType(parent))
    monkeypatch.setattr(support, "require_gpu", lambda what, device: None)


def mean_of_products(hidden: Tensor, head: Tensor, targets: Tensor, reduction: str, **options: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(hidden @ head.T, targets, reduction=reduction)


class LigerLoss:
    def __init__(self, *, reduction: str, accum_dtype: torch.dtype) -> None:
        assert accum_dtype == torch.float32
        self.reduction = reduction

    def __call__(self, lin_weight: Tensor, _input: Tensor, target: Tensor) -> Tensor:
        return mean_of_products(_input, lin_weight, target, self.reduction)


@pytest.mark.parametrize("peer", ["Liger", "CCE", "CCE without its filter", "QuACK"])
@pytest.mark.parametrize("loop", [cross_entropy.a_depth_at_a_time, cross_entropy.flattened])
def test_peers_of_the_cross_entropy(peer: str, loop: Callable[..., Step], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "liger_kernel.transformers", LigerFusedLinearCrossEntropyLoss=LigerLoss)
    install(monkeypatch, "cut_cross_entropy", linear_cross_entropy=mean_of_products)
    install(monkeypatch, "quack.linear_cross_entropy", chunked_linear_cross_entropy=mean_of_products)
    inputs = cross_entropy.make_inputs(cross_entropy.SHAPES["toy"][0], torch.float32, CPU)
    step = loop(cross_entropy.PEERS[peer](CPU, "bfloat16"), inputs)
    expected = cross_entropy.a_depth_at_a_time(cross_entropy.eager, inputs.to(torch.float64))()
    for _ in range(2):  # a second step finds what the first has left
        assert disagreement(step(), expected) < 1e-5


@pytest.mark.parametrize("width", [None, 5])
def test_xformers(width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_hand(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """What xformers documents: `[B, T, heads, width]`."""
        scores = scale * torch.einsum("bthw,bshw->bhts", query, key)
        return torch.einsum("bhts,bshw->bthw", scores.softmax(-1), value)

    install(monkeypatch, "xformers.ops", memory_efficient_attention=by_hand)
    z, values = torch.randn(3, 6, 4), None if width is None else torch.randn(3, 6, width)
    found, expected = (prepare(z, None)(z, values) for prepare in (attention.xformers, attention.eager))
    torch.testing.assert_close(found, expected)


def test_a_missing_gpu_or_package_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with pytest.raises(Unavailable, match=r"^cut_cross_entropy needs an NVIDIA GPU$"):
        cross_entropy.PEERS["CCE"](CPU, "bfloat16")
    install(monkeypatch, "cut_cross_entropy", linear_cross_entropy=mean_of_products)
    with pytest.raises(Unavailable, match=r"float16 and bfloat16 alone, not float32"):
        cross_entropy.PEERS["CCE"](CPU, "float32")
    (tmp_path / "built_for_another.py").write_text("raise OSError('undefined symbol\\nand more')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unavailable, match=r"^built_for_another cannot be imported: OSError: undefined symbol$"):
        support.imported("built_for_another", CPU)


def test_a_first_run_that_fails_is_the_reason() -> None:
    def fails() -> list[Tensor]:
        raise RuntimeError("\nno kernel for this width\nTriton said: …")

    with pytest.raises(Unavailable, match=r"^RuntimeError: no kernel for this width$"):
        support.peer("a peer", lambda: fails).prepare()
