"""Tiles between shared memory, registers and the tensor cores: which thread holds which element.

A warp's 32 threads hold eight rows of four: thread 4 r + c the elements 2 c and 2 c + 1 of row r, or of 32 bits the
element c.
"""

from __future__ import annotations

import numpy as np

from .formats import TF32_MASK, UNSIGNED, Array, bfloat_to_float, half_to_float
from .machine import WARP, Threads
from .ptx import Fault

ROWS = 8
ROW_BYTES = 16
# Of 8 factors of TF32 or 16 of 16 bits, those that are summed at once; and the bits that are kept of the largest. Those
# of an A100, taken for every card: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores" (2021).
DEPTH_OF_A_SUM = {8: 4, 16: 8}
SUMMED_BITS = 25
LEAST_UNIT = -126  # whose inverse is a float32
FLOAT32_BITS = ~np.int64(2**29 - 1)  # of the 53 bits of a float64


def load(threads: Threads, registers: list[str], addresses: Array, transposed: bool) -> None:
    """`ldmatrix`: 8 rows of 16 bytes for each register; thread 8 i + r has the address of row r of the i-th matrix."""
    some, matrices = _row_threads(threads, len(registers)), len(registers)
    words = threads.shared.load(addresses[some], 4, ROW_BYTES // 4, threads.who().at(some), "ldmatrix")
    tiles = np.stack(words, 1).view(np.uint16).reshape(-1, matrices, ROWS, ROWS)
    if transposed:
        tiles = tiles.swapaxes(2, 3)
    held = np.ascontiguousarray(tiles).view(np.uint32)
    for place, register in enumerate(registers):
        threads.assign(register, held[:, place].reshape(-1))


def store(threads: Threads, values: list[Array], addresses: Array, transposed: bool) -> None:
    """`stmatrix`: the way back."""
    some, matrices = _row_threads(threads, len(values)), len(values)
    held = np.stack([value.reshape(-1, ROWS, 4) for value in values], 1)
    tiles = held.view(np.uint16).reshape(-1, matrices, ROWS, ROWS)
    if transposed:
        tiles = tiles.swapaxes(2, 3)
    words = np.ascontiguousarray(tiles).view(np.uint32).reshape(-1, ROW_BYTES // 4)
    columns = [np.ascontiguousarray(column) for column in words.T]
    threads.shared.store(addresses[some], columns, 4, threads.who().at(some), "stmatrix")


def _row_threads(threads: Threads, matrices: int) -> Array:
    """The threads whose addresses count: the first eight of each warp for one matrix, all for four."""
    return threads.in_warps(np.arange(threads.count))[:, : ROWS * matrices].reshape(-1)


def numbers(bits: Array, kind: str) -> Array:
    """What the tensor cores see, in float32: `[…, 2]` of packed 16 bits, `[…, 1]` of TF32 without its lower bits."""
    if kind == "tf32":
        return (bits & TF32_MASK).view(np.float32)[..., None]
    halves = np.ascontiguousarray(bits)[..., None].view(np.uint16)
    return _narrow(halves, kind)


def _narrow(bits: Array, kind: str) -> Array:
    if kind not in ("f16", "bf16"):
        raise Fault(f"the emulator does not know products of {kind}")
    return bfloat_to_float(bits) if kind == "bf16" else half_to_float(bits)


def accumulate(left: Array, right: Array, before: Array) -> Array:
    """`before + left · right` in float32, `[…, rows, columns]`, as tensor cores sum.

    Some products at a time, which are exact. They and the sum before them are cut to the bits of the largest, and one
    more, and so is their sum to the 24 bits of a float32: nothing is rounded.
    """
    step = DEPTH_OF_A_SUM[left.shape[-1]]
    total = before
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, left.shape[-1], step):
            products = left[..., start : start + step, None] * right[..., None, start : start + step, :]
            largest = np.maximum(np.maximum(products.max(-2), -products.min(-2)), np.abs(total))
            finite = np.isfinite(largest)
            if finite.all():
                total = _cut_sum(products, total, largest)
            else:
                held = np.where(finite[..., None, :], products, 0), np.where(finite, total, 0)
                cut = _cut_sum(*held, np.where(finite, largest, 0))
                total = np.where(finite, cut, products.sum(-2) + total)
    return total


def _cut_sum(products: Array, total: Array, largest: Array) -> Array:
    unit = np.maximum(np.frexp(largest)[1] - SUMMED_BITS, LEAST_UNIT)
    inverse = np.ldexp(np.float32(1), -unit)
    # A conversion to integers cuts off.
    integers = (products * inverse[..., None, :]).astype(np.int32).sum(-2, dtype=np.int32)
    integers += (total * inverse).astype(np.int32)
    cut = (integers.astype(np.float64).view(np.int64) & FLOAT32_BITS).view(np.float64)
    return np.ldexp(cut, unit).astype(np.float32)


def _left_factor(registers: list[Array], kind: str) -> Array:
    """`[warps, 16, k]` of the four registers of each thread: rows r and r + 8, and then both further along k."""
    held = numbers(np.stack(registers, 1), kind)
    each = held.shape[-1]
    tiles = held.reshape(-1, ROWS, 4, 2, 2, each)  # warp, row, thread of the row, half of k, half of the rows, element
    return tiles.transpose(0, 4, 1, 3, 2, 5).reshape(-1, 2 * ROWS, 8 * each)


def multiply(
    threads: Threads, targets: list[str], left: list[Array], right: list[Array], summand: list[Array], kind: str
) -> None:
    """`mma.m16n8k16` of 16 bits, `m16n8k8` of TF32: products are exact, and summed in float32."""
    threads.in_warps(left[0])
    a = _left_factor(left, kind)
    held = numbers(np.stack(right, 1), kind)
    each = held.shape[-1]
    b = held.reshape(-1, ROWS, 4, 2, each).transpose(0, 3, 2, 4, 1).reshape(-1, 8 * each, ROWS)
    before = np.stack([one.view(np.float32) for one in summand], 1)
    before = before.reshape(-1, ROWS, 4, 2, 2).transpose(0, 3, 1, 2, 4).reshape(-1, 2 * ROWS, ROWS)
    sums = accumulate(a, b, before).reshape(-1, 2, ROWS, 4, 2).transpose(0, 2, 3, 1, 4).reshape(threads.count, 4)
    for place, target in enumerate(targets):
        threads.assign(target, np.ascontiguousarray(sums[:, place]).view(np.uint32))


def multiply_in_groups(
    threads: Threads,
    targets: list[str],
    left: list[Array],
    right: Array,
    keeps: Array,
    columns: int,
    kind: str,
    across: list[bool],
) -> None:
    """`wgmma.m64nNk16`, `k8` of TF32: of groups of four warps, the right factor and maybe the left in shared memory.

    Args:
        left: four registers, or one with the descriptor of a matrix.
        right: descriptors.
        keeps: whether to add to what the targets hold.
        columns: N.
        across: of the factors in shared memory, whether neighbors lie across the summation rather than along it.
    """
    group = 4 * WARP
    if threads.program.threads % group or not threads.whole_blocks:
        raise Fault("a wgmma that not all threads of four warps reach")
    size = 4 if kind == "tf32" else 2
    depth = 32 // size
    first = np.arange(0, threads.count, group)
    if len(left) == 1:
        a = _described(threads, left[0][first], first, 64, depth, size, across[0], kind)
    else:
        a = _left_factor(left, kind).reshape(-1, 64, depth)
    b = _described(threads, right[first], first, columns, depth, size, across[-1], kind)
    held = [np.where(keeps, threads.value(target), np.uint32(0)).view(np.float32) for target in targets]
    before = np.stack(held, 1).reshape(-1, 4, ROWS, 4, columns // 8, 2, 2)
    before = before.transpose(0, 1, 5, 2, 4, 3, 6).reshape(-1, 64, columns)
    sums = accumulate(a, b.swapaxes(1, 2), before).reshape(-1, 2, ROWS, columns // 8, 4, 2)
    sums = sums.transpose(0, 2, 4, 3, 1, 5).reshape(threads.count, columns // 2)
    for place, target in enumerate(targets):
        threads.assign(target, np.ascontiguousarray(sums[:, place]).view(np.uint32))


SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}


def _described(
    threads: Threads, descriptors: Array, first: Array, rows: int, depth: int, size: int, across: bool, kind: str
) -> Array:
    """`[groups, rows, depth]` of a matrix in shared memory.

    It lies in pieces of eight lines of 16, 32, 64 or 128 bytes, whose 16 bytes are exchanged with each other by the
    line they are in. The descriptor has the start, the distances between pieces in both directions, and that width.
    """

    def field(low: int, bits: int) -> Array:
        return (descriptors >> np.uint64(low) & np.uint64(2**bits - 1)).astype(np.int64)[:, None, None]

    start, leading, stride = (16 * field(low, 14) for low in (0, 16, 32))
    modes = field(62, 2)
    if (modes != modes[0]).any() or field(49, 3).any():
        raise Fault("the emulator does not know a wgmma whose groups differ, or whose matrices start inside a piece")
    width = SWIZZLES[int(modes[0, 0, 0])]
    row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    along, line = (row * size, k) if across else (k * size, row)
    offsets = start + along % width + line % 8 * width + along // width * leading + line // 8 * stride
    if width > 16:
        offsets = offsets ^ (((offsets >> 7) & (width // 16 - 1)) << 4)
    groups, flat = len(first), offsets.reshape(-1)
    who = threads.who().at(np.repeat(first, rows * depth))
    (bits,) = threads.shared.load(flat, size, 1, who, "wgmma")
    bits = bits.reshape(groups, rows, depth).astype(UNSIGNED[size])
    return numbers(bits, kind)[..., 0] if kind == "tf32" else _narrow(bits, kind)
