"""Reconstruction errors of all depths in one launch, and their gradients in another.

    ℓ_l = Σ (x̂_l − s)² / tokens,      dx̂_l = f_l (x̂_l − s),      ds = −Σ_l f_l (x̂_l − s),      f_l = 2 dℓ_l / tokens

The reconstructions come as a tuple of pointers, never stacked. A program takes the same elements of every depth, so
that the target is read once. Each program leaves one partial sum a depth; adding those up is the launcher's second
stage, always in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels.launch import Launch, card_of, ceil_div


class ReconstructionBlocks(NamedTuple):
    """The shape of a block: elements of one depth that a program takes, and its warps."""

    elements: int
    warps: int


# 16 bytes a thread and load in bfloat16; a card with more bandwidth to fill takes more warps.
BLOCKS = {
    "consumer": ReconstructionBlocks(1024, 4),
    "ampere": ReconstructionBlocks(2048, 8),
    "hopper": ReconstructionBlocks(2048, 8),
}


@triton.jit
def _difference(reconstruction, target_block, offsets, kept):
    return tl.where(kept, tl.load(reconstruction + offsets, mask=kept, other=0.0).to(tl.float32) - target_block, 0.0)


@triton.jit
def _kept(padding, offsets, elements, width, HAS_PADDING: tl.constexpr):
    kept = offsets < elements
    if HAS_PADDING:
        kept = kept & (tl.load(padding + offsets // width, mask=kept, other=1) == 0)
    return kept


@triton.jit
def _reconstruction_kernel(
    reconstructions,  # a tuple of DEPTHS tensors [elements]
    target,  # [elements]
    padding,  # [elements / width], not 0 at padding
    partials,  # [DEPTHS, programs] float32
    elements,
    width,
    stride_depth,
    DEPTHS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = _kept(padding, offsets, elements, width, HAS_PADDING)
    target_block = tl.load(target + offsets, mask=kept, other=0.0).to(tl.float32)
    for depth in tl.static_range(DEPTHS):
        difference = _difference(reconstructions[depth], target_block, offsets, kept)
        tl.store(partials + depth * stride_depth + program, tl.sum(difference * difference, 0))


@triton.jit
def _reconstruction_backward_kernel(
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
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    kept = _kept(padding, offsets, elements, width, HAS_PADDING)
    target_block = tl.load(target + offsets, mask=kept, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
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


def reconstruction_errors(
    reconstructions: Sequence[Tensor],
    target: Tensor,
    padding: Tensor | None,
    *,
    blocks: ReconstructionBlocks | None = None,
) -> Tensor:
    """`[depths]` float32: the squared errors of each depth, summed over everything that is not padding.

    Args:
        reconstructions: contiguous tensors of the shape of `target`, `[..., n]`, of any dtype each.
        target: contiguous, `[..., n]`.
        padding: `[...]` bool, contiguous, true at the tokens that do not count.
        blocks: the shape of a block, default by the card.
    """
    blocks = BLOCKS[card_of(target).family] if blocks is None else blocks
    programs = ceil_div(target.numel(), blocks.elements)
    partials = torch.empty(len(reconstructions), programs, device=target.device, dtype=torch.float32)
    arguments, constants = _shared(reconstructions, target, padding, blocks)
    arguments |= {"partials": partials, "stride_depth": partials.stride(0)}
    Launch(_reconstruction_kernel, (programs,), arguments, constants, warps=blocks.warps, stages=2).run()
    return partials.sum(1)


def reconstruction_gradients(
    reconstructions: Sequence[Tensor],
    target: Tensor,
    padding: Tensor | None,
    factors: Tensor,
    wanted: Sequence[bool],
    wants_target: bool,
    *,
    blocks: ReconstructionBlocks | None = None,
) -> list[Tensor]:
    """The gradients of the depths that are `wanted`, and after them that of the target where it is wanted.

    Args:
        factors: `[depths]` float32, `2 dℓ_l / tokens`; a depth whose factor is 0 gets a gradient of zeros.
        reconstructions, target, padding, blocks: as in `reconstruction_errors`.
    """
    blocks = BLOCKS[card_of(target).family] if blocks is None else blocks
    written = [torch.empty_like(depth) for depth, want in zip(reconstructions, wanted, strict=True) if want]
    grad_target = [torch.empty_like(target)] if wants_target else []
    fresh = iter(written)
    arguments, constants = _shared(reconstructions, target, padding, blocks)
    arguments |= {
        "gradients": tuple(next(fresh) if want else depth for depth, want in zip(reconstructions, wanted, strict=True)),
        "factors": factors,
        "grad_target": grad_target[0] if wants_target else target,
    }
    constants |= {
        "WRITTEN": sum(1 << depth for depth, want in enumerate(wanted) if want),
        "WITH_TARGET": wants_target,
    }
    grid = (ceil_div(target.numel(), blocks.elements),)
    Launch(_reconstruction_backward_kernel, grid, arguments, constants, warps=blocks.warps, stages=2).run()
    return written + grad_target


def _shared(
    reconstructions: Sequence[Tensor], target: Tensor, padding: Tensor | None, blocks: ReconstructionBlocks
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments and the constants that both kernels take."""
    assert all(tensor.shape == target.shape for tensor in reconstructions)
    assert padding is None or padding.shape == target.shape[:-1]
    arguments: dict[str, Any] = {
        "reconstructions": tuple(reconstructions),
        "target": target,
        "padding": target if padding is None else padding.view(torch.uint8),
        "elements": target.numel(),
        "width": target.shape[-1],
    }
    constants = {"DEPTHS": len(reconstructions), "HAS_PADDING": padding is not None, "BLOCK": blocks.elements}
    return arguments, constants
