"""The dual update of constraints of descent, and the weights of the depths, in one launch each (docs/maths.md §3, §4).

    ℓ = sums / count,   g_l = ℓ_l − f_l ℓ_{l−1},  over |ℓ_{l−1}| where relative; at an anchor ε₀ in the place of ℓ_{l−1}
    λ ← [λ + η m̂ / (√v̂ + 10⁻⁸)]₊   with m̂, v̂ of g − u − κλ,      u ← [u − η_u (β u − λ)]₊
    w_l = c_l (ā_L / ā_l) + λ_l − r_{l+1} λ_{l+1}

One program holds all depths, in float64. `cdt_fast.constraints` is the formula, in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdt_fast.kernels.arguments import DepthWeightsArguments, DualUpdateArguments
from cdt_fast.kernels.blocks import Blocks
from cdt_fast.kernels.launch import Launch, block_width

# Of a block of one warp; more keep too much of the state in the registers of a thread.
DEPTHS_OF_A_WARP = 64


@triton.jit
def _is_finite(numbers):
    return tl.abs(numbers) < float("inf")


@triton.jit
def _all(flags):
    return tl.min(flags.to(tl.int32), 0) != 0


@triton.jit
def _power(base, exponents):
    """Of a number and whole exponents below 2³²."""
    bits = exponents.to(tl.int64)
    power = tl.full(exponents.shape, 1.0, exponents.dtype)
    for bit in range(32):
        power = tl.where(((bits >> bit) & 1) != 0, power * base, power)
        base = base * base
    return power


@triton.jit(do_not_specialize=["depths"])
def dual_update_kernel(
    accumulated,  # [depths + 1], sums of the losses and their count
    factors,  # [depths], what bounds a loss over the one that it is compared with
    exists,  # [depths] bool
    uses_reference,  # [depths] bool, whether that one is the reference
    reference,  # []
    reference_measurements,  # [] int64; None: the reference is given
    average,  # [depths], of the losses, or None
    average_updates,  # [] int64
    multipliers,  # [depths]
    slacks,  # [depths]
    first_moment,  # [depths]
    second_moment,  # [depths]
    updates,  # [depths]
    skipped_updates,  # [] int64
    settings,  # [7]: rate; decay of a moment and what is left to one, of both; cost and rate of the slacks
    depths,
    MEASUREMENTS: tl.constexpr,
    AVERAGED: tl.constexpr,
    EPSILON: tl.constexpr,
    RESILIENCE: tl.constexpr,
    RELATIVE: tl.constexpr,
    MOVES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    depth = tl.arange(0, COLUMNS)
    inside = depth < depths
    # Everything is read before the barrier, and written behind it.
    count = tl.load(accumulated + depths)
    losses = tl.load(accumulated + depth, mask=inside, other=0.0) / count
    before = tl.load(accumulated + depth - 1, mask=inside & (depth > 0), other=0.0) / count
    first_loss = tl.load(accumulated) / count
    finite = _all(_is_finite(losses) | (depth >= depths))
    level = tl.load(reference)
    active = tl.load(exists + depth, mask=inside, other=0) != 0
    of_reference = tl.load(uses_reference + depth, mask=inside, other=1) != 0
    if reference_measurements is not None:
        measurements = tl.load(reference_measurements)
        taken = finite & (measurements < MEASUREMENTS)
        level = tl.where(taken, level + (first_loss - level) / (measurements + 1).to(level.dtype), level)
        measurements += taken.to(tl.int64)
        active = active & ((measurements >= MEASUREMENTS) | (of_reference == 0))
    if average is not None:
        averaged = tl.load(average + depth, mask=inside, other=0.0)
        seen = tl.load(average_updates) + finite.to(tl.int64)
        share = tl.minimum(tl.maximum(seen, 1), AVERAGED).to(level.dtype)
        averaged = tl.where(finite, averaged + (losses - averaged) / share, averaged)
    if MOVES:
        before = tl.where(of_reference, level, before)
        error = losses - tl.load(factors + depth, mask=inside, other=0.0) * before
        if RELATIVE:
            error = error / tl.abs(before)
        own = tl.load(multipliers + depth, mask=inside, other=0.0)
        gradient = error
        cost = tl.load(settings + 5)
        if RESILIENCE == "slack":
            slack = tl.load(slacks + depth, mask=inside, other=0.0)
            error = error - slack
            gradient = error
            slack = slack - tl.load(settings + 6) * (cost * slack - own)
        if RESILIENCE == "decay":
            gradient = error - own / cost
        first_decay, second_decay = tl.load(settings + 1), tl.load(settings + 3)
        moved = tl.load(updates + depth, mask=inside, other=0.0) + 1.0
        first = first_decay * tl.load(first_moment + depth, mask=inside, other=0.0) + tl.load(settings + 2) * gradient
        second = second_decay * tl.load(second_moment + depth, mask=inside, other=0.0)
        second += tl.load(settings + 4) * (gradient * gradient)
        scale = tl.sqrt(second / (1.0 - _power(second_decay, moved))) + EPSILON
        own = own + tl.load(settings) * (first / (1.0 - _power(first_decay, moved))) / scale
        sound = _is_finite(error) & _is_finite(first) & _is_finite(second) & _is_finite(own)
        if RESILIENCE == "slack":
            sound = sound & _is_finite(slack)
        accepted = finite & _all(sound | (active == 0))
        skipped = tl.load(skipped_updates) + (accepted == 0).to(tl.int64)
    tl.debug_barrier()
    if reference_measurements is not None:
        tl.store(reference, level)
        tl.store(reference_measurements, measurements)
    if average is not None:
        tl.store(average + depth, averaged, mask=inside)
        tl.store(average_updates, seen)
    if MOVES:
        kept = inside & active & accepted
        tl.store(multipliers + depth, tl.maximum(own, 0.0), mask=kept)
        tl.store(first_moment + depth, first, mask=kept)
        tl.store(second_moment + depth, second, mask=kept)
        tl.store(updates + depth, moved, mask=kept)
        if RESILIENCE == "slack":
            tl.store(slacks + depth, tl.maximum(slack, 0.0), mask=kept)
        tl.store(skipped_updates, skipped)
    tl.store(accumulated + depth, tl.zeros([COLUMNS], level.dtype), mask=depth <= depths)


@triton.jit(do_not_specialize=["depths"])
def depth_weights_kernel(
    multipliers,  # [depths]
    coefficients,  # [depths], of the objective
    upstream,  # [depths - 1], the share of a multiplier that the depth before carries
    average,  # [depths], of the losses, zeros before the first; or None
    weights,  # [depths]
    depths,
    COLUMNS: tl.constexpr,
):
    depth = tl.arange(0, COLUMNS)
    inside, has_next = depth < depths, depth < depths - 1
    objective = tl.load(coefficients + depth, mask=inside, other=0.0)
    if average is not None:
        ratio = tl.load(average + depths - 1) / tl.load(average + depth, mask=inside, other=1.0)
        objective *= tl.where(_is_finite(ratio), ratio, 1.0)
    carried = tl.load(upstream + depth, mask=has_next, other=0.0)
    carried *= tl.load(multipliers + depth + 1, mask=has_next, other=0.0)
    own = tl.load(multipliers + depth, mask=inside, other=0.0) - carried
    tl.store(weights + depth, objective + own, mask=inside)


def dual_update(duals: DualUpdateArguments) -> None:
    """Take the recorded sums into reference and average, with `moves` move the multipliers, and clear the sums.

    All tensors are contiguous; but for counts and flags they are float64.
    """
    depths = duals.multipliers.numel()
    Launch(dual_update_kernel, (1,), _blocks(depths), {"depths": depths}, {}, duals).run()


def depth_weights(depths: DepthWeightsArguments) -> Tensor:
    """The weights of the depths, `[L+1]`; all tensors are contiguous, and but for the count float64."""
    weights = torch.empty_like(depths.multipliers)
    count = weights.numel()
    Launch(depth_weights_kernel, (1,), _blocks(count), {"weights": weights, "depths": count}, {}, depths).run()
    return weights


def _blocks(depths: int) -> Blocks:
    columns = block_width(depths + 1)
    return Blocks(columns=columns, warps=max(1, columns // DEPTHS_OF_A_WARP))
