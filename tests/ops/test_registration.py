"""What all operators share: autograd's contract, with the dispatcher and without it, the backend of the forward."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cdt_fast import ops
from cdt_fast.errors import InputError
from cdt_fast.kernels import cards
from cdt_fast.kernels.cards import CARDS
from cdt_fast.ops.shared.registration import OPERATORS
from tests.ops.ops_cases import assert_close, assert_equal, leaf, normal

STEP: dict[str, Any] = {"step": 0.2, "threshold": 0.1}


def of_the_loss(*tensors: Tensor) -> Tensor:
    return ops.layerwise_reconstruction_loss([*tensors[:-1]], tensors[-1])[0]


def of_the_layer(codes: Tensor, signal: Tensor, dictionary: Tensor, following: Tensor) -> Tensor:
    outputs = ops.unrolled_layer(codes, signal, dictionary, next_dictionary=following, target=signal, **STEP)
    return torch.stack([output.float().square().sum() for output in outputs]).sum()


# Every op that has operators: a function of tensors, and their shapes.
CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "symmetric_attention": (ops.symmetric_attention, [(2, 3, 4), (2, 3, 5)]),
    "residual_linear": (ops.residual_linear, [(2, 3, 4), (4, 5), (5,)]),
    "lista_step": (lambda *tensors: ops.lista_step(*tensors, **STEP), [(2, 3, 5), (2, 3, 4), (4, 5)]),
    "layerwise_reconstruction_loss": (of_the_loss, [(2, 3, 4)] * 3),
    "unrolled_layer": (of_the_layer, [(2, 3, 5), (2, 3, 4), (4, 5), (4, 5)]),
}


def inputs(name: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [leaf(normal(seed, *shape, dtype=dtype)) for seed, shape in enumerate(CASES[name][1])]


def results(function: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    output = function(*leaves)
    return [output, *torch.autograd.grad(output.float().square().sum(), leaves)]


class Noted(TorchDispatchMode):
    """Notes the operators of this package that the dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "cdt_fast":
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CASES)
def test_a_dispatch_mode_sees_the_operators_and_changes_nothing(name: str) -> None:
    function, _ = CASES[name]
    expected = results(function, inputs(name))
    with Noted() as noted:
        found = results(function, inputs(name))
    assert noted.names == [name, f"{name}_backward"]
    assert_equal(found, expected)


class Wrapped(Tensor):
    """A subclass, whose operations the dispatcher has to see."""


@pytest.mark.parametrize("name", CASES)
def test_a_subclass_of_tensor_goes_through_the_dispatcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, seen = OPERATORS[name], []
    overload = operator.overload
    monkeypatch.setattr(operator, "overload", lambda *flat: (seen.append(name), overload(*flat))[1])
    expected = results(CASES[name][0], inputs(name))
    assert not seen
    found = results(CASES[name][0], [tensor.detach().as_subclass(Wrapped).requires_grad_() for tensor in inputs(name)])
    assert seen == [name]
    assert_equal([tensor.as_subclass(Tensor) for tensor in found], expected)


@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_second_derivative_is_refused(name: str, dispatched: bool) -> None:
    leaves = inputs(name)
    with Noted() if dispatched else contextlib.nullcontext():
        output = CASES[name][0](*leaves)
        gradients = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
    with pytest.raises(InputError, match=rf"^{name} can be differentiated once; for a second derivative use its ref"):
        torch.autograd.grad(gradients[0].square().sum(), leaves, allow_unused=True)


@pytest.mark.parametrize("name", CASES)
def test_frozen_inputs_get_no_gradient_and_change_no_other(name: str) -> None:
    full = None
    for trained in itertools.product([True, False], repeat=len(CASES[name][1])):
        leaves = [tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(inputs(name), trained, strict=True)]
        output = CASES[name][0](*leaves)
        assert output.requires_grad == any(trained)
        if any(trained):
            output.float().square().sum().backward()
        found = [tensor.grad for tensor in leaves]
        full = full or found
        assert [gradient is not None for gradient in found] == list(trained)
        assert_close([g for g in found if g is not None], [g for g, w in zip(full, trained, strict=True) if w])


@pytest.mark.parametrize("name", CASES)
def test_no_upstream_gradient_is_no_gradient(name: str) -> None:
    class Drop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, _: Tensor) -> None:
            return None

    leaves = inputs(name)
    Drop.apply(CASES[name][0](*leaves)).sum().backward()
    assert [tensor.grad for tensor in leaves] == [None] * len(leaves)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CASES)
def test_without_gradients(name: str, mode: Any) -> None:
    leaves = inputs(name)
    expected, before = CASES[name][0](*leaves), [tensor.detach().clone() for tensor in leaves]
    with mode():
        output = CASES[name][0](*leaves)
    assert not output.requires_grad
    assert_equal([output, *leaves], [expected, *before])


@pytest.mark.parametrize("name", CASES)
def test_backward_called_inside_autocast_gives_the_gradients_of_the_forward(name: str) -> None:
    leaves = inputs(name)
    output = CASES[name][0](*leaves)
    upstream = torch.ones_like(output)
    expected = torch.autograd.grad(output, leaves, upstream, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(torch.autograd.grad(output, leaves, upstream), expected)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Kernels can run, and what they would launch is noted."""
    pytest.importorskip("triton")
    from cdt_fast.kernels.launch import recording

    monkeypatch.setattr(cards, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cards, "unsupported_reason", lambda *_: None)
    with recording(CARDS["RTX 3090"]) as launches:
        yield launches


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_runs_where_the_forward_has_run(name: str, as_on_a_gpu: list[Any]) -> None:
    function, leaves = CASES[name][0], inputs(name)
    with ops.use_backend("torch"):
        output = function(*leaves)
    as_on_a_gpu.clear()
    with ops.use_backend("triton"):
        found = torch.autograd.grad(output.float().square().sum(), leaves)
        assert not as_on_a_gpu
        with ops.use_backend("torch"):
            assert_equal(found, results(function, inputs(name))[1:])
        output = function(*leaves)
    forward = len(as_on_a_gpu)
    assert forward
    with ops.use_backend("torch"):
        output.sum().backward()
    has_kernel = name != "residual_linear"  # its gradient is torch's products
    assert (len(as_on_a_gpu) > forward) == has_kernel


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_function_follows_the_backend(name: str, as_on_a_gpu: list[Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(CASES[name][0], fullgraph=True, backend="aot_eager")
    leaves = inputs(name, torch.float16)
    with ops.use_backend("torch"):
        expected = results(CASES[name][0], leaves)
        assert_equal(results(compiled, leaves), expected)
    assert not as_on_a_gpu
    with ops.use_backend("triton"):
        output = compiled(*leaves)
        forward = len(as_on_a_gpu)
        assert forward
        output.sum().backward()
        assert len(as_on_a_gpu) > forward or name == "residual_linear"
    as_on_a_gpu.clear()
    with ops.use_backend("torch"):
        assert_equal(results(compiled, leaves), expected)
    assert not as_on_a_gpu
