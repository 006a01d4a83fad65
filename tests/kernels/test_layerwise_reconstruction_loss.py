"""The kernels of the layerwise reconstruction loss against their formulas in float64, and the op on them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.errors import InputError
from cdt_fast.kernels.arguments import ReconstructionLossArguments, ReconstructionLossBackwardArguments
from cdt_fast.kernels.blocks import Blocks
from cdt_fast.kernels.layerwise_reconstruction_loss import reconstruction_backward, reconstruction_forward
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss_reference
from tests.kernels.kernel_cases import gradients_of, normal
from tests.kernels.precision import assert_as_precise

BLOCK = 32
ELEMENTS = Blocks(columns=BLOCK, warps=1, stages=2)


def depths_and_target(
    count: int, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    made = [normal(depth, *shape).to(device, dtype) for depth in range(count + 1)]
    return [_between_nan(depth) for depth in made[:-1]], _between_nan(made[-1])


def errors(depths: list[Tensor], target: Tensor, padding: Tensor | None = None) -> Tensor:
    loss = ReconstructionLossArguments(reconstructions=depths, target=target, padding=padding)
    return reconstruction_forward(loss, ELEMENTS)


def differentiate(depths: list[Tensor], target: Tensor, factors: Tensor, **given: Any) -> list[Tensor]:
    options = {"needs_reconstructions": [True] * len(depths), **given}
    loss = ReconstructionLossBackwardArguments(reconstructions=depths, target=target, grad=factors, **options)
    return reconstruction_backward(loss, factors, ELEMENTS)


def _between_nan(tensor: Tensor) -> Tensor:
    buffer = tensor.new_full((tensor.numel() + 6,), float("nan"))
    inside = buffer[3:-3].view(tensor.shape)
    inside.copy_(tensor)
    return inside


SHAPES = [(1, 1), (1, BLOCK - 1), (BLOCK, 1), (3, 11), (5, 7), (1, 2 * BLOCK + 3), (2, 3, 9)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 3])
def test_errors_and_gradients(
    count: int, shape: tuple[int, ...], padded: bool, device: torch.device, dtype: torch.dtype
) -> None:
    depths, target = depths_and_target(count, shape, device, dtype)
    padding = torch.rand(shape[:-1], generator=torch.Generator().manual_seed(5)).to(device) < 0.4 if padded else None
    factors = normal(7, count).float().to(device)

    def formula(depths: list[Tensor], target: Tensor, factors: Tensor) -> tuple[Tensor, list[Tensor]]:
        kept = 1 if padding is None else (~padding).to(target).unsqueeze(-1).to(target.device)
        differences = [kept * (depth - target) for depth in depths]
        gradients = [factor * difference for factor, difference in zip(factors, differences, strict=True)]
        return torch.stack([d.square().sum() for d in differences]), [*gradients, -torch.stack(gradients).sum(0)]

    plain = formula([depth.float() for depth in depths], target.float(), factors)
    padding_there, padding = padding, None if padding is None else padding.cpu()
    exact = formula([depth.cpu().double() for depth in depths], target.cpu().double(), factors.cpu().double())
    padding = padding_there
    if padding is not None:
        for tensor in (*depths, target):
            tensor[padding] = float("nan")
    assert_as_precise("errors", errors(depths, target, padding), plain[0], exact[0])
    given = differentiate(depths, target, factors, padding=padding, needs_target=True)
    for name, one, torchs, right in zip(map(str, range(count + 1)), given, plain[1], exact[1], strict=True):
        assert_as_precise(name, one, torchs.to(dtype), right)

    # What is not needed is not written, and changes nothing else.
    for needed in itertools.product((False, True), repeat=count):
        some = differentiate(depths, target, factors, padding=padding, needs_reconstructions=[*needed])
        chosen = list(itertools.compress(given, needed))
        assert len(some) == len(chosen)
        assert all(torch.equal(one, other) for one, other in zip(some, chosen, strict=True))


def test_a_depth_of_factor_zero_gets_zeros_and_is_not_read(device: torch.device, dtype: torch.dtype) -> None:
    depths, target = depths_and_target(3, (5, 11), device, dtype)
    factors = torch.tensor([1.0, 0.0, -2.0], device=device)
    depths[1].fill_(float("nan"))
    given = differentiate(depths, target, factors, needs_target=True)
    others = differentiate(depths[::2], target, factors[::2].contiguous(), needs_target=True)
    assert (given[1] == 0).all()
    assert all(torch.equal(given[place], other) for place, other in zip((0, 2, 3), others, strict=True))


def test_depths_of_different_dtypes(device: torch.device) -> None:
    depths, target = depths_and_target(2, (5, 11), device, torch.float32)
    narrow = [depths[0].half(), depths[1]]
    wide = [depth.float() for depth in narrow]
    assert torch.equal(errors(narrow, target), errors(wide, target))
    factors = torch.ones(2, device=device)
    given, right = (differentiate(depths, target, factors) for depths in (narrow, wide))
    assert given[0].dtype == torch.float16
    assert torch.equal(given[0], right[0].half())
    assert torch.equal(given[1], right[1])


@pytest.mark.emulated
@pytest.mark.parametrize("weights", [None, [0.5, 0.0, -2.0]])
def test_the_reconstruction_op(weights: list[float] | None, device: torch.device, dtype: torch.dtype) -> None:
    made = [normal(depth, 2, 5, 7) for depth in range(4)]
    factors = [1.0] * 3 if weights is None else weights
    results = []
    for run_device, run_dtype in ((device, dtype), (device, torch.float32), (torch.device("cpu"), torch.float64)):
        leaves = [tensor.to(dtype).to(run_device, run_dtype).requires_grad_() for tensor in made]
        if not results:
            strided = [leaf.mT.contiguous().mT for leaf in leaves]
            total, per_layer = ops.layerwise_reconstruction_loss(strided[:3], strided[3], depth_weights=weights)
        else:
            per_layer = layerwise_reconstruction_loss_reference(leaves[:3], leaves[3])
            total = torch.dot(per_layer.new_tensor(factors), per_layer)
        results.append([per_layer.detach(), *gradients_of(total, leaves)])
    for name, given, plain, exact in zip(("losses", "0", "1", "2", "target"), *results, strict=True):
        assert_as_precise(name, given, plain.to(given.dtype), exact)


def test_a_depth_that_the_kernels_cannot_load_is_refused(device: torch.device) -> None:
    depths = [torch.zeros(2, 3, device=device), torch.zeros(2, 3, device=device, dtype=torch.float64)]
    with pytest.raises(InputError, match=r"cannot run layerwise_reconstruction_loss here: .* not in float64"):
        ops.layerwise_reconstruction_loss(depths, torch.zeros(2, 3, device=device))


def test_repeats_are_bitwise_equal(device: torch.device, dtype: torch.dtype) -> None:
    def once() -> list[Tensor]:
        leaves = [normal(seed, 19, 16).to(device, dtype).requires_grad_() for seed in range(3)]
        total, per_layer = ops.layerwise_reconstruction_loss(leaves[:2], leaves[2])
        return [per_layer, *gradients_of(total, leaves)]

    assert all(torch.equal(one, other) for one, other in zip(once(), once(), strict=True))


def test_on_a_gpu_the_host_never_waits(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    depths = [normal(seed, 33, 16).to(device, torch.float32).requires_grad_() for seed in range(2)]
    target, weights = normal(5, 33, 16).to(device, torch.float32), torch.ones(2, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for given in (weights, None):
            ops.layerwise_reconstruction_loss(depths, target, depth_weights=given)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
