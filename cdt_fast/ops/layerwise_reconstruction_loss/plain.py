"""Squared errors of all depths and their gradients in plain torch, some rows at a time.

A pass over a tensor that no longer fits the caches costs more than its arithmetic. So some rows are squared and summed,
or differentiated and rounded, before the next are, and a target is cast once for all depths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import ReconstructionLossBackwardArguments
from cdt_fast.ops.shared.products import rows_of

# So many numbers at a time: with fewer the calls of torch cost most, with more the memory.
NUMBERS_A_BLOCK = 2**19
# On a GPU without the kernel the launches are what costs.
NUMBERS_A_BLOCK_ON_GPU = 2**25

# torch's names for what becomes of the squares.
_NO_REDUCTION, _SUM = 0, 2


def widest(tensors: Sequence[Tensor]) -> torch.dtype:
    """The widest of the dtypes, at least float32."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def errors_in_torch(reconstructions: Sequence[Tensor], target: Tensor, padding: Tensor | None) -> Tensor:
    """`Σ ‖x̂_l − s‖²` over the tokens that count, `[depths]`, in the widest dtype of the depths, at least float32."""

    def squares(_: int, depth: Tensor, target: Tensor, out: Tensor) -> None:
        torch.ops.aten.mse_loss.out(depth, target, _NO_REDUCTION, out=out)

    zero = target.new_zeros((), dtype=widest(reconstructions))
    sums = [[zero] for _ in reconstructions]
    for _, number, block in _blocks(reconstructions, target, padding, dict.fromkeys(range(len(sums))), squares):
        sums[number].append(block.sum(dtype=zero.dtype))
    return torch.stack([torch.stack(parts).sum() for parts in sums])


def gradients_in_torch(loss: ReconstructionLossBackwardArguments, factors: Sequence[Tensor | None]) -> list[Tensor]:
    """`f_l (x̂_l − s)` of the depths that are needed and, where it is, the gradient of the target: minus their sum.

    A factor f_l is None where it is known to be zero.
    """
    reconstructions, target = loss.reconstructions, loss.target
    # The sum over the depths in one place, rounded once to the dtype of the target.
    wide = widest([*reconstructions, target])
    total = torch.zeros_like(target, dtype=wide, memory_format=torch.contiguous_format) if loss.needs_target else None
    rows_of_total = None if total is None else rows_of(total)
    gradients: list[Tensor] = []
    halves: dict[int, Tensor] = {}
    rooms: dict[int, Tensor | None] = {}
    for number, (depth, factor, needed) in enumerate(
        zip(reconstructions, factors, loss.needs_reconstructions, strict=True)
    ):
        if needed:
            make = torch.zeros_like if factor is None else torch.empty_like
            gradients.append(make(depth, memory_format=torch.contiguous_format))
        if factor is not None and (needed or loss.needs_target):
            # torch's gradient of a square has the 2 that is in the factors already.
            halves[number] = factor.to(torch.promote_types(depth.dtype, torch.float32)) * 0.5
            rooms[number] = rows_of(gradients[-1]) if needed else None

    def gradient(number: int, depth: Tensor, target: Tensor, out: Tensor) -> None:
        torch.ops.aten.mse_loss_backward.grad_input(halves[number], depth, target, _SUM, grad_input=out)

    for rows, number, block in _blocks(reconstructions, target, loss.padding, rooms, gradient):
        if rows_of_total is not None:
            rows_of_total[rows] -= block
        room = rooms[number]
        if room is not None and room.dtype != block.dtype:
            room[rows] = block
    return gradients if total is None else [*gradients, total.to(target.dtype)]


def _blocks(
    reconstructions: Sequence[Tensor],
    target: Tensor,
    padding: Tensor | None,
    rooms: Mapping[int, Tensor | None],
    operation: Callable[[int, Tensor, Tensor, Tensor], None],
) -> Iterator[tuple[slice, int, Tensor]]:
    """Rows, a depth, and what `operation` makes of it there in at least float32; zero at padding, whatever is there.

    `rooms` has the depths, and for each `[rows, n]` that the result is written to where it is of its dtype, or None:
    into memory that the next one overwrites. `operation` is called with the number of a depth, some of its rows, those
    of the target in the same dtype, and where to write; that may be where the depth's rows are.
    """
    depths = {number: rows_of(reconstructions[number]) for number in rooms}
    dtypes = {number: torch.promote_types(depth.dtype, torch.float32) for number, depth in depths.items()}
    target = rows_of(target)
    count, width = target.shape
    hidden = None if padding is None else padding.reshape(count, 1)
    numbers = NUMBERS_A_BLOCK if target.device.type == "cpu" else NUMBERS_A_BLOCK_ON_GPU
    height = max(1, min(count, numbers // max(1, width)))
    shared = {dtype: target.new_empty(height, width, dtype=dtype) for dtype in set(dtypes.values())}
    for start in range(0, count, height):
        rows = slice(start, min(count, start + height))
        targets = {dtype: target[rows].to(dtype) for dtype in shared}
        for number, room in rooms.items():
            depth, dtype = depths[number][rows], dtypes[number]
            block = shared[dtype][: rows.stop - start] if room is None or room.dtype != dtype else room[rows]
            operation(number, depth if depth.dtype == dtype else block.copy_(depth), targets[dtype], block)
            if hidden is not None:
                block.masked_fill_(hidden[rows], 0.0)
            yield rows, number, block
