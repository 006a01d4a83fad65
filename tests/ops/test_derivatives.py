"""Derivatives other than autograd's gradient: right, or refused by the op's name; never zero without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from cdt_fast import ops
from cdt_fast.errors import InputError
from tests.ops.ops_cases import normal
from tests.ops.test_registration import CASES, inputs

LENGTHS = torch.tensor([3, 1])
TARGET = normal(20, 2, 3, 4)
HEAD = normal(9, 3, 4)
TARGETS = torch.tensor([[0, 1, 2], [2, 1, 0]])


def layer(*tensors: Tensor) -> Tensor:
    codes, signal, dictionary, following = tensors
    options = {"step": 0.2, "threshold": 0.1, "next_dictionary": following, "target": TARGET.to(codes.dtype)}
    return torch.cat([output.flatten() for output in ops.unrolled_layer(codes, signal, dictionary, **options)])


# In place of the case of that name, whose target is its signal, and beside the cases of every operator.
OPTIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "unrolled_layer": (layer, CASES["unrolled_layer"][1]),
    "soft_threshold": (lambda x: ops.soft_threshold(x, 0.1), [(2, 3)]),
    "attention, energy, lengths": (
        lambda z: ops.symmetric_attention(z, scale=0.5, energy=True, lengths=LENGTHS),
        [(2, 3, 4)],
    ),
    "layer, lengths, projection": (
        lambda codes, signal, dictionary: torch.cat(
            ops.unrolled_layer(
                codes,
                signal,
                dictionary,
                projection=signal,
                lengths=LENGTHS,
                nonlinearity="relu",
                step=0.2,
                threshold=0.0,
            ),
            -1,
        ),
        [(2, 3, 5), (2, 3, 4), (4, 5)],
    ),
    "loss, lengths, weights": (
        lambda shallow, deep, target, weights: ops.layerwise_reconstruction_loss(
            [shallow, deep], target, lengths=LENGTHS, depth_weights=weights
        )[0],
        [(2, 3, 4), (2, 3, 4), (2, 3, 4), (2,)],
    ),
}
ALL = CASES | OPTIONS


def of(name: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    function, shapes = ALL[name]
    return function, [normal(seed + 1, *shape) for seed, shape in enumerate(shapes)]


def cross_entropy(hidden: Tensor, **options: Any) -> Tensor:
    return ops.layerwise_cross_entropy([hidden, hidden], HEAD, TARGETS, **options)[0]


@pytest.mark.parametrize("name", ALL)
def test_forward_mode_is_right(name: str) -> None:
    function, tensors = of(name)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_backward_ad=True)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_a_tangent_is_never_lost(name: str, requires_grad: bool) -> None:
    """Also that of one argument alone, where no gradient is asked for."""
    function, tensors = of(name)
    for number, tensor in enumerate(tensors):
        tangent = normal(50, *tensor.shape)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(tensor.detach().requires_grad_(requires_grad), tangent)
            found = forward_ad.unpack_dual(function(*tensors[:number], dual, *tensors[number + 1 :])).tangent
        expected = torch.func.jvp(
            lambda x, number=number: function(*tensors[:number], x, *tensors[number + 1 :]), (tensor,), (tangent,)
        )[1]
        assert found is not None
        assert found.norm() > 0
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ALL)
def test_the_transforms_of_torch_func_agree_with_autograd(name: str) -> None:
    function, tensors = of(name)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    cotangent = normal(60, *output.shape)
    expected = torch.autograd.grad(output, leaves, cotangent)
    pull = torch.func.vjp(function, *tensors)[1]
    torch.testing.assert_close(pull(cotangent), expected)
    every = tuple(range(len(tensors)))
    jacobian = torch.func.jacrev(function, every)(*tensors)
    forward = torch.func.jacfwd(function, every)(*tensors)
    torch.testing.assert_close(forward, jacobian)
    for row, gradient in zip(jacobian, expected, strict=True):
        torch.testing.assert_close(torch.tensordot(cotangent, row, cotangent.dim()), gradient)


def test_gradients_of_single_samples() -> None:
    z = normal(1, 5, 2, 3, 4)

    def loss(z: Tensor) -> Tensor:
        return ops.symmetric_attention(z).square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(z)
    leaf = z.clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(loss(leaf), leaf)[0])


def test_lengths_may_be_mapped_over() -> None:
    z, lengths = normal(1, 4, 2, 3, 4), torch.tensor([[3, 1], [0, 2], [1, 1], [3, 3]])

    def attention(z: Tensor, lengths: Tensor) -> Tensor:
        return ops.symmetric_attention(z, lengths=lengths)

    torch.testing.assert_close(torch.func.vmap(attention)(z, lengths), attention(z, lengths))


def test_a_hessian_is_that_of_the_formula() -> None:
    z = normal(1, 3, 2)
    found = torch.func.hessian(lambda z: ops.symmetric_attention(z).square().sum())(z)
    expected = torch.func.hessian(lambda z: (torch.softmax(z @ z.mT, -1) @ z).square().sum())(z)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_16_bits_keep_their_dtype_and_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    function = ALL[name][0]
    tensors = [tensor.detach() for tensor in inputs(name, dtype)]
    tangents = [tensor.flip(0) for tensor in tensors]
    primal, tangent = torch.func.jvp(function, tuple(tensors), tuple(tangents))[:2]
    expected = torch.func.jvp(function, tuple(map(Tensor.double, tensors)), tuple(map(Tensor.double, tangents)))[1]
    assert primal.dtype == tangent.dtype == function(*tensors).dtype
    assert (tangent.double() - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("name", CASES)
def test_inside_torch_compile(name: str) -> None:
    function, tensors = of(name)
    torch._dynamo.reset()

    def derivative(*tensors: Tensor) -> Tensor:
        return torch.func.jvp(function, tensors, tensors)[1]

    torch.testing.assert_close(torch.compile(derivative, backend="aot_eager")(*tensors), derivative(*tensors))


@pytest.mark.parametrize("options", [{}, {"depth_weights": [1.0, 0.5]}], ids=["without weights", "with weights"])
@pytest.mark.parametrize("transform", ["jvp", "vjp", "grad", "vmap", "hessian", "dual"])
def test_cross_entropy_is_refused_by_name(transform: str, options: dict[str, Any]) -> None:
    hidden = normal(1, 2, 3, 4)

    def loss(hidden: Tensor) -> Tensor:
        return cross_entropy(hidden, **options)

    def dual() -> Any:
        with forward_ad.dual_level():
            return loss(forward_ad.make_dual(hidden, hidden))

    ways: dict[str, Callable[[], Any]] = {
        "jvp": lambda: torch.func.jvp(loss, (hidden,), (hidden,)),
        "vjp": lambda: torch.func.vjp(loss, hidden),
        "grad": lambda: torch.func.grad(loss)(hidden),
        "vmap": lambda: torch.func.vmap(loss)(hidden.expand(2, -1, -1, -1)),
        "hessian": lambda: torch.func.hessian(loss)(hidden),
        "dual": dual,
    }
    with pytest.raises(InputError, match=r"^layerwise_cross_entropy has no derivative in forward mode.*_reference$"):
        ways[transform]()


def test_cross_entropy_may_be_a_constant_of_a_transform() -> None:
    hidden = normal(1, 2, 3, 4)
    assert torch.func.grad(lambda factor: 3 * factor + cross_entropy(hidden))(torch.ones(())).item() == 3


def test_weights_that_require_a_gradient() -> None:
    states = [normal(seed, 2, 3, 4) for seed in (1, 2)]
    weights = torch.tensor([0.0, -2.0], dtype=torch.float64, requires_grad=True)
    total, per_layer = ops.layerwise_reconstruction_loss(states, normal(3, 2, 3, 4), depth_weights=weights)
    torch.testing.assert_close(torch.autograd.grad(total, weights)[0], per_layer)
    total, per_layer, *_ = ops.layerwise_cross_entropy(states, HEAD, TARGETS, depth_weights=weights)
    torch.testing.assert_close(torch.autograd.grad(total, weights)[0], per_layer)
    assert total == torch.dot(weights, per_layer)
