"""Reconstruction errors of all depths in one launch, and their gradients in another.

    ℓ_l = Σ (x̂_l − s)² / tokens,      dx̂_l = f_l (x̂_l − s),      ds = −Σ_l f_l (x̂_l − s),      f_l = 2 dℓ_l / tokens

The reconstructions come as a tuple of pointers, never stacked. A program takes the same elements of every depth, so
that the target is read once. Each program leaves one partial sum a depth; adding those up is the launcher's second
stage, always in the same order.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels.arguments import ReconstructionLossArguments, ReconstructionLossBackwardArguments
from cdt_fast.kernels.blocks import LAYERWISE_RECONSTRUCTION_LOSS, Blocks
from cdt_fast.kernels.launch import Launch, ceil_div


@triton.jit
def _difference(reconstruction, target_block, offsets, kept):
    return tl.where(kept, tl.load(reconstruction + offsets, mask=kept, other=0.0).to(tl.float32) - target_block, 0.0)


@triton.jit
def _kept(padding, offsets, elements, width, HAS_PADDING: tl.constexpr):
    kept = offsets < elements
    if HAS_PADDING:
        kept = kept & (tl.load(padding + offsets // width, mask=kept, other=1) == 0)
    return kept


@triton.jit(do_not_specialize=["stride_depth"])
def reconstruction_forward_kernel(
    reconstructions,  # a tuple of DEPTHS tensors [elements]
    target,  # [elements]
    padding,  # [elements / width], not 0 at padding
    partials,  # [DEPTHS, programs] float32
    elements,
    width,
    stride_depth,
    DEPTHS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    kept = _kept(padding, offsets, elements, width, HAS_PADDING)
    target_block = tl.load(target + offsets, mask=kept, other=0.0).to(tl.float32)
    for depth in tl.static_range(DEPTHS):
        difference = _difference(reconstructions[depth], target_block, offsets, kept)
        tl.store(partials + depth * stride_depth + program, tl.sum(difference * difference, 0))


@triton.jit
def reconstruction_backward_kernel(
    reconstructions,  # a tuple of DEPTHS tensors [elements]
    gradients,  # a tuple of DEPTHS tensors [elements]; those without their bit in WRITTEN are not touched
    target,  # [elements]
    padding,  # [elements / width], not 0 at padding
    factors,  # [DEPTHS] float32
    grad_target,  # [elements], written where WITH_TARGET
    elements,
    width,
    DEPTHS: tl.constexpr,
    WRITTEN: tl.constexpr,
    WITH_TARGET: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = offsets < elements
    kept = _kept(padding, offsets, elements, width, HAS_PADDING)
    target_block = tl.load(target + offsets, mask=kept, other=0.0).to(tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for depth in tl.static_range(DEPTHS):
        factor = tl.load(factors + depth)
        # A depth that is switched off gets zeros, also where its reconstruction is not finite; it is not read.
        counts = kept & (offsets < tl.where(factor == 0.0, 0, elements))
        gradient = factor * _difference(reconstructions[depth], target_block, offsets, counts)
        if (WRITTEN >> depth) & 1:
            tl.store(gradients[depth] + offsets, gradient.to(gradients[depth].dtype.element_ty), mask=inside)
        total += gradient
    if WITH_TARGET:
        tl.store(grad_target + offsets, (0.0 - total).to(grad_target.dtype.element_ty), mask=inside)


def reconstruction_forward(loss: ReconstructionLossArguments, blocks: Blocks | None = None) -> Tensor:
    """`[depths]` float32: the squared errors of each depth, summed over everything that is not padding.

    All tensors are contiguous, of any dtype each.
    """
    blocks = blocks or LAYERWISE_RECONSTRUCTION_LOSS.blocks(loss.target)
    programs = ceil_div(loss.target.numel(), blocks.columns)
    partials = torch.empty(len(loss.reconstructions), programs, device=loss.target.device, dtype=torch.float32)
    arguments, constants = _shared(loss)
    arguments |= {"partials": partials, "stride_depth": partials.stride(0)}
    Launch(reconstruction_forward_kernel, (programs,), blocks, arguments, constants).run()
    return partials.sum(1)


def reconstruction_backward(
    loss: ReconstructionLossBackwardArguments, factors: Tensor, blocks: Blocks | None = None
) -> list[Tensor]:
    """The gradients of the depths that are needed, and after them that of the target where it is needed.

    All tensors are contiguous, of any dtype each. The factors are `[depths]` float32, `2 dℓ_l / tokens`; a depth whose
    factor is 0 gets a gradient of zeros.
    """
    depths, target = loss.reconstructions, loss.target
    blocks = blocks or LAYERWISE_RECONSTRUCTION_LOSS.blocks(target)
    gradients = [
        torch.empty_like(depth) if needed else depth
        for depth, needed in zip(depths, loss.needs_reconstructions, strict=True)
    ]
    grad_target = torch.empty_like(target) if loss.needs_target else target
    arguments, constants = _shared(loss)
    arguments |= {"gradients": tuple(gradients), "factors": factors, "grad_target": grad_target}
    constants |= {
        "WRITTEN": sum(1 << depth for depth, needed in enumerate(loss.needs_reconstructions) if needed),
        "WITH_TARGET": loss.needs_target,
    }
    grid = (ceil_div(target.numel(), blocks.columns),)
    Launch(reconstruction_backward_kernel, grid, blocks, arguments, constants).run()
    needed = [*loss.needs_reconstructions, loss.needs_target]
    return list(itertools.compress([*gradients, grad_target], needed))


def _shared(loss: ReconstructionLossArguments) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments and the constants that both kernels take."""
    target, padding = loss.target, loss.padding
    assert all(tensor.shape == target.shape for tensor in loss.reconstructions)
    assert padding is None or padding.shape == target.shape[:-1]
    arguments: dict[str, Any] = {
        "reconstructions": tuple(loss.reconstructions),
        "target": target,
        "padding": target if padding is None else padding.view(torch.uint8),
        "elements": target.numel(),
        "width": target.shape[-1],
    }
    return arguments, {"DEPTHS": len(loss.reconstructions), "HAS_PADDING": padding is not None}
