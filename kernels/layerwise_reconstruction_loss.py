"""Reconstruction errors of all depths in one launch, and their gradients in another.

    ℓ_l = Σ (x̂_l − s)² / tokens,      dx̂_l = f_l (x̂_l − s),      ds = −Σ_l f_l (x̂_l − s),      f_l = 2 dℓ_l / tokens

The reconstructions come as a tuple of pointers, never stacked. A program takes the same elements of every depth, so
that the target is read once. Each program leaves one partial sum a depth; adding those up is the launcher's second
stage, always in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels._common import Blocks

# 16 bytes a thread and load in bfloat16; a card with more bandwidth takes more warps.
BLOCKS = {
    "consumer": {"COLUMNS": 1024, "num_warps": 4, "num_stages": 2},
    "ampere": {"COLUMNS": 2048, "num_warps": 8, "num_stages": 2},
    "hopper": {"COLUMNS": 2048, "num_warps": 8, "num_stages": 2},
    "float32": {"COLUMNS": 1024, "num_warps": 4, "num_stages": 2},
}


@triton.jit
def _difference(reconstruction, target_block, offsets, kept):
    return tl.where(kept, tl.load(reconstruction + offsets, mask=kept, other=0.0).to(tl.float32) - target_block, 0.0)


@triton.jit
def _kept(padding, offsets, elements, width):
    kept = offsets < elements
    if padding is not None:
        kept = kept & (tl.load(padding + offsets // width, mask=kept, other=1) == 0)
    return kept


@triton.jit(do_not_specialize=["stride_depth"])
def reconstruction_forward_kernel(
    reconstructions,  # a tuple of DEPTHS tensors [elements]
    target,  # [elements]
    padding,  # [elements / width], not 0 at padding, or None
    partials,  # [DEPTHS, programs] float32
    elements,
    width,
    stride_depth,
    DEPTHS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    kept = _kept(padding, offsets, elements, width)
    target_block = tl.load(target + offsets, mask=kept, other=0.0).to(tl.float32)
    for depth in tl.static_range(DEPTHS):
        difference = _difference(reconstructions[depth], target_block, offsets, kept)
        tl.store(partials + depth * stride_depth + program, tl.sum(difference * difference, 0))


@triton.jit
def reconstruction_backward_kernel(
    reconstructions,  # a tuple of DEPTHS tensors [elements]
    gradients,  # a tuple of DEPTHS tensors [elements]; those without their bit in WRITTEN are not touched
    target,  # [elements]
    padding,  # [elements / width], not 0 at padding, or None
    factors,  # [DEPTHS] float32
    grad_target,  # [elements] or None
    elements,
    width,
    DEPTHS: tl.constexpr,
    WRITTEN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = offsets < elements
    kept = _kept(padding, offsets, elements, width)
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
    if grad_target is not None:
        tl.store(grad_target + offsets, (0.0 - total).to(grad_target.dtype.element_ty), mask=inside)


def forward(reconstructions: Sequence[Tensor], target: Tensor, padding: Tensor | None, blocks: Blocks) -> Tensor:
    """Return `[depths]` float32: the squared errors of each depth, summed over everything that is not padding."""
    depths, elements = len(reconstructions), target.numel()
    programs = triton.cdiv(elements, blocks["COLUMNS"])
    partials = torch.empty(depths, programs, device=target.device, dtype=torch.float32)
    if programs:
        reconstruction_forward_kernel[(programs,)](
            tuple(depth.contiguous() for depth in reconstructions),
            target.contiguous(),
            None if padding is None else padding.contiguous().view(torch.uint8),
            partials,
            *(elements, target.shape[-1], partials.stride(0)),
            DEPTHS=depths,
            **blocks,
        )
    return partials.sum(1)


def backward(
    depths: list[Tensor], target: Tensor, padding: Tensor | None, factors: Tensor, needs: list[bool], blocks: Blocks
) -> list[Tensor | None]:
    """Return the gradients of the depths and last of the target, those that are needed. The factors are `[depths]`
    float32, `2 dℓ_l / tokens`; a depth whose factor is 0 gets a gradient of zeros."""
    tensors = [*depths, target]
    gradients = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if needed else tensor
        for tensor, needed in zip(tensors, needs, strict=True)
    ]
    programs = triton.cdiv(target.numel(), blocks["COLUMNS"])
    if programs:
        reconstruction_backward_kernel[(programs,)](
            tuple(depth.contiguous() for depth in depths),
            tuple(gradients[:-1]),
            target.contiguous(),
            None if padding is None else padding.contiguous().view(torch.uint8),
            factors,
            gradients[-1] if needs[-1] else None,
            *(target.numel(), target.shape[-1]),
            DEPTHS=len(depths),
            WRITTEN=sum(1 << depth for depth, needed in enumerate(needs[:-1]) if needed),
            **blocks,
        )
    return [gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)]
