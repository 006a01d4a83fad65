"""The kernels of the LISTA step against their formulas in float64, and the op on them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.kernels.arguments import ListaStepArguments, ListaStepBackwardArguments
from cdt_fast.kernels.blocks import WIDEST, Blocks
from cdt_fast.kernels.lista_step import lista_step_backward, lista_step_forward
from cdt_fast.ops.lista_step import lista_step_reference
from tests.kernels.kernel_cases import SHAPES, normal
from tests.kernels.precision import assert_as_precise, far_apart, poisoned

SMALL = Blocks(rows=16, atoms=16, warps=4, stages=2)
STEP, THRESHOLD = 0.3, 0.2


def inputs(rows: int, width: int, atoms: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    tensors = normal(0, rows, atoms), normal(1, rows, width), normal(2, width, atoms) / max(1, width) ** 0.5
    return [tensor.to(dtype).to(device) for tensor in tensors]


def forward(
    codes: Tensor, signal: Tensor, dictionary: Tensor, *, blocks: Blocks | None = SMALL, **changed: Any
) -> tuple[Tensor, Tensor]:
    options = {"codes": codes, "signal": signal, "dictionary": dictionary, "step": STEP, "threshold": THRESHOLD}
    return lista_step_forward(ListaStepArguments(**{**options, **changed}), blocks)


def backward(
    grad_output: Tensor, output: Tensor, dictionary: Tensor, *, blocks: Blocks | None = SMALL, **changed: Any
) -> tuple[Tensor, Tensor, Tensor]:
    options = {"grad_output": grad_output, "output": output, "dictionary": dictionary, "step": STEP}
    return lista_step_backward(ListaStepBackwardArguments(**{**options, "nonlinearity": "relu", **changed}), blocks)


def written_forward(
    codes: Tensor, signal: Tensor, dictionary: Tensor, nonlinearity: str = "soft_threshold"
) -> tuple[Tensor, Tensor]:
    threshold = 0.0 if nonlinearity == "identity" else THRESHOLD
    name = "soft_threshold" if nonlinearity == "identity" else nonlinearity
    next_codes = lista_step_reference(codes, signal, dictionary, step=STEP, threshold=threshold, nonlinearity=name)
    return next_codes, signal - codes @ dictionary.mT


def written_backward(
    grad_output: Tensor, output: Tensor, dictionary: Tensor, nonlinearity: str = "relu"
) -> tuple[Tensor, Tensor, Tensor]:
    grad_update = grad_output if nonlinearity == "identity" else grad_output * (output != 0)
    grad_residual = STEP * (grad_update @ dictionary.mT)
    return grad_update - grad_residual @ dictionary, grad_residual, grad_update


def assert_all_precise(names: str, function: Any, given: tuple[Tensor, ...], tensors: list[Tensor], *args: Any) -> None:
    plain = function(*tensors, *args)
    exact = function(*(tensor.cpu().double() for tensor in tensors), *args)
    for name, *results in zip(names.split(), given, plain, exact, strict=True):
        assert results[0].is_contiguous()
        assert_as_precise(name, *results)


def gradient_inputs(rows: int, width: int, atoms: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """An upstream gradient, codes of which a third are zero, and a dictionary."""
    codes, _, dictionary = inputs(rows, width, atoms, device, dtype)
    upstream = normal(3, rows, atoms).to(dtype).to(device)
    return [upstream, torch.where(codes.abs() < 0.43, 0.0, codes), dictionary]


FORWARD, BACKWARD = "codes residual", "grad_codes grad_residual grad_update"


@pytest.mark.parametrize("shape", SHAPES)
def test_sizes(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> None:
    tensors = [poisoned(tensor) for tensor in inputs(*shape, device, dtype)]
    assert_all_precise(FORWARD, written_forward, forward(*tensors), tensors)
    upstream, codes, dictionary = gradient_inputs(*shape, device, dtype)
    tensors = [poisoned(upstream), codes, poisoned(dictionary)]
    assert_all_precise(BACKWARD, written_backward, backward(*tensors), tensors)


@pytest.mark.parametrize("nonlinearity", ["soft_threshold", "hard_threshold", "relu", "identity"])
def test_nonlinearities(nonlinearity: str, device: torch.device, dtype: torch.dtype) -> None:
    tensors = inputs(35, 20, 18, device, dtype)
    results = forward(*tensors, nonlinearity=nonlinearity)
    assert_all_precise(FORWARD, written_forward, results, tensors, nonlinearity)
    assert (results[0] == 0).any() == (nonlinearity != "identity")
    assert (results[0] < 0).any() == (nonlinearity != "relu")
    tensors = gradient_inputs(35, 20, 18, device, dtype)
    results = backward(*tensors, nonlinearity=nonlinearity)
    assert_all_precise(BACKWARD, written_backward, results, tensors, nonlinearity)


@pytest.mark.emulated
@pytest.mark.parametrize("width", [40, WIDEST])
def test_the_default_blocks(width: int, device: torch.device, dtype: torch.dtype) -> None:
    tensors = inputs(70, width, 150, device, dtype)
    assert_all_precise(FORWARD, written_forward, forward(*tensors, blocks=None), tensors)
    tensors = gradient_inputs(70, width, 150, device, dtype)
    assert_all_precise(BACKWARD, written_backward, backward(*tensors, blocks=None), tensors)


def test_only_what_is_wanted_is_written(device: torch.device) -> None:
    tensors = inputs(18, 17, 20, device, torch.float32)
    next_codes, _ = forward(*tensors)
    again, nothing = forward(*tensors, keep_residual=False)
    assert torch.equal(again, next_codes)
    assert nothing.shape == (0, 17)
    tensors = gradient_inputs(18, 17, 20, device, torch.float32)
    everything = backward(*tensors)
    for codes, update in itertools.product((True, False), repeat=2):
        results = backward(*tensors, needs_codes=codes, needs_dictionary=update)
        for is_wanted, result, expected in zip((codes, True, update), results, everything, strict=True):
            assert torch.equal(result, expected[: None if is_wanted else 0])


def test_strides(device: torch.device, dtype: torch.dtype) -> None:
    def same(tensor: Tensor) -> Tensor:
        return tensor

    def transposed(tensor: Tensor) -> Tensor:
        return tensor.mT.contiguous().mT

    tensors, upstream = inputs(19, 18, 33, device, dtype), gradient_inputs(19, 18, 33, device, dtype)
    expected = [*forward(*tensors), *backward(*upstream)]
    for first, second, third in (
        (same, transposed, poisoned),
        (transposed, poisoned, same),
        (poisoned, same, transposed),
    ):
        codes, signal, dictionary = tensors
        found = [*forward(first(codes), second(signal), third(dictionary))]
        found += backward(first(upstream[0]), upstream[1], third(upstream[2]))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    # The gradient of a plain sum has stride 0 in both dimensions.
    ones = torch.ones(1, 1, dtype=dtype, device=device).expand(19, 33)
    for one, other in zip(backward(ones, *upstream[1:]), backward(ones.contiguous(), *upstream[1:]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("far", ["codes", "signal", "dictionary", "grad_output"])
@pytest.mark.parametrize("dimension", [0, 1])
def test_offsets_beyond_32_bits(far: str, dimension: int, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 8 GiB of free GPU memory")
    codes, signal, dictionary = inputs(3, 3, 3, device, torch.float16)
    grad_output, output, _ = gradient_inputs(3, 3, 3, device, torch.float16)
    tensors = {"codes": codes, "signal": signal, "dictionary": dictionary, "grad_output": grad_output}

    def run() -> list[Tensor]:
        results = forward(tensors["codes"], tensors["signal"], tensors["dictionary"])
        return [*results, *backward(tensors["grad_output"], output, tensors["dictionary"])]

    expected = run()
    tensors[far] = far_apart(tensors[far], dimension)
    assert all(torch.equal(one, other) for one, other in zip(run(), expected, strict=True))


def test_products_sum_in_float32(device: torch.device) -> None:
    # 4096 and then 64 chunks that add 1 each: float16 would stay at 4096, whose next neighbor is 4100.
    codes = torch.full((16, 1024), 1 / 16, dtype=torch.float16, device=device)
    codes[:, 0] = 4096
    ones = torch.ones_like(codes)
    _, residual = forward(codes, ones.new_zeros(16, 16), ones, step=0.0)
    assert (residual == -4160).all()
    _, grad_residual, _ = backward(codes, ones, ones, step=1.0, needs_codes=False)
    assert (grad_residual == 4160).all()


def test_a_nan_stays_in_its_row_and_passes(device: torch.device) -> None:
    codes, signal, dictionary = inputs(18, 16, 17, device, torch.float32)
    codes[5, 3], signal[17, 2] = float("nan"), float("nan")
    for nonlinearity in ("soft_threshold", "relu", "identity"):
        next_codes, residual = forward(codes, signal, dictionary, nonlinearity=nonlinearity)
        alone = [row not in (5, 17) for row in range(18)]
        assert torch.isfinite(next_codes[alone]).all()
        assert torch.isfinite(residual[alone]).all()
        assert torch.isnan(next_codes[[5, 17]]).all()
    upstream, output, dictionary = gradient_inputs(18, 16, 17, device, torch.float32)
    output[4] = float("nan")
    _, _, grad_update = backward(upstream, output, dictionary)
    assert torch.equal(grad_update[4], upstream[4])
    # Where a code is zero an upstream NaN is stopped.
    output[6], upstream[6] = 0.0, float("nan")
    grad_codes, grad_residual, _ = backward(upstream, output, dictionary)
    assert (grad_codes[6] == 0).all()
    assert (grad_residual[6] == 0).all()


def test_extreme_values(device: torch.device) -> None:
    tensors = inputs(18, 16, 17, device, torch.float32)
    for size in (1e-30, 1e15):
        scaled = [tensors[0] * size, tensors[1] * size, tensors[2]]
        next_codes, residual = forward(*scaled, threshold=THRESHOLD * size)
        expected, expected_residual = forward(*tensors)
        torch.testing.assert_close(next_codes / size, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(residual / size, expected_residual, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0)])
def test_empty(shape: tuple[int, int, int], device: torch.device) -> None:
    codes, signal, dictionary = inputs(*shape, device, torch.float32)
    next_codes, residual = forward(codes, signal, dictionary, nonlinearity="identity")
    assert torch.equal(next_codes, codes)
    assert torch.equal(residual, signal)
    grad_codes, grad_residual, grad_update = backward(codes, torch.ones_like(codes), dictionary)
    assert torch.equal(grad_codes, codes)
    assert torch.equal(grad_update, codes)
    assert torch.equal(grad_residual, torch.zeros_like(signal))


def test_repeats_are_bitwise_equal(device: torch.device, dtype: torch.dtype) -> None:
    tensors, upstream = inputs(35, 20, 50, device, dtype), gradient_inputs(35, 20, 50, device, dtype)
    first = [*forward(*tensors), *backward(*upstream)]
    for _ in range(2):
        again = [*forward(*tensors), *backward(*upstream)]
        assert all(torch.equal(one, other) for one, other in zip(again, first, strict=True))


# The op: one kernel for narrow tokens, cuBLAS and `residual_linear` for wide ones


@pytest.mark.parametrize("width", [24, WIDEST + 3])
@pytest.mark.parametrize("nonlinearity", ["soft_threshold", "relu", "identity"])
def test_the_op_has_the_values_and_gradients_of_plain_torch(
    nonlinearity: str, width: int, device: torch.device, dtype: torch.dtype
) -> None:
    codes, signal, dictionary = inputs(40, width, 20, device, dtype)
    options: dict[str, Any] = {"step": STEP, "threshold": THRESHOLD, "nonlinearity": nonlinearity}
    if nonlinearity == "identity":
        options |= {"threshold": 0.0, "nonlinearity": "soft_threshold"}
    # No update lies so near to a kink that rounding could move it across: the same gradients pass.
    kink = options["threshold"] if options["nonlinearity"] == "soft_threshold" else 0.0
    for _ in range(50):
        update = codes.double() + STEP * (signal - codes @ dictionary.mT).double() @ dictionary.double()
        near = (update.abs() - kink).abs() < 0.02
        if nonlinearity == "identity" or not near.any():
            break
        codes = torch.where(near, codes + 0.05, codes)
    else:
        pytest.fail("there is always an update near a kink")
    upstream = normal(5, 40, 20).to(dtype).to(device)

    def run(function: Any, where: torch.device, wanted: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(where, wanted).requires_grad_() for tensor in (codes, signal, dictionary)]
        output = function(*leaves, **options)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(where, wanted))]

    found = run(ops.lista_step, device, dtype)
    plain = run(lista_step_reference, device, dtype)
    exact = run(lista_step_reference, torch.device("cpu"), torch.float64)
    for name, *results in zip(("output", "codes", "signal", "dictionary"), found, plain, exact, strict=True):
        assert_as_precise(name, *results)


@pytest.mark.parametrize("width", [24, WIDEST + 3])
def test_the_op_with_frozen_inputs(width: int, device: torch.device) -> None:
    tensors = inputs(20, width, 20, device, torch.float32)
    everything = None
    for trained in itertools.product([True, False], repeat=3):
        leaves = [tensor.clone().requires_grad_(wanted) for tensor, wanted in zip(tensors, trained, strict=True)]
        output = ops.lista_step(*leaves, step=STEP, threshold=THRESHOLD)
        if any(trained):
            output.sum().backward()
        found = [tensor.grad for tensor in leaves]
        everything = everything or found
        for wanted, gradient, expected in zip(trained, found, everything, strict=True):
            assert (gradient is not None) == wanted
            if gradient is not None:
                assert expected is not None
                assert torch.equal(gradient, expected)
