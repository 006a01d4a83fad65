"""Global and shared memory, and who has touched what since the last barrier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .formats import UNSIGNED, Array
from .ptx import Fault

# Below this no memory of a process lies.
LOWEST_ADDRESS = 16
# Of more pairs of bytes than this in the arguments of a launch, races are not looked for.
MOST_UNITS = 2**26


@dataclass(frozen=True)
class Who:
    """Threads that touch memory: their blocks, their warps over all blocks, and barriers that their blocks passed."""

    block: Array
    warp: Array
    epoch: Array

    def at(self, index: Array | slice) -> Who:
        return Who(self.block[index], self.warp[index], self.epoch[index])

    def repeated(self, times: int) -> Who:
        return Who(*(np.repeat(one, times) for one in (self.block, self.warp, self.epoch)))


class Accesses:
    """Pairs of bytes, and the warps that have read and written them: two without a barrier between them are a race.

    A warp's own accesses are in order. Barriers order the warps of a block; nothing orders two blocks of a launch.
    """

    UNIT: ClassVar[int] = 2
    NOBODY: ClassVar[int] = -1
    SEVERAL: ClassVar[int] = -2

    def __init__(self, units: int, warps_a_block: int) -> None:
        self.warps_a_block = warps_a_block
        self.writer, self.write_epoch, self.reader, self.read_epoch, self.reading_block = (
            np.full(units, self.NOBODY, np.int32) for _ in range(5)
        )

    def read(self, units: Array, who: Who) -> bool:
        """Note that these threads read, each a unit, and say whether another warp has written one unordered."""
        writer = self.writer[units]
        race = (writer != self.NOBODY) & (writer != who.warp)
        race &= (writer // self.warps_a_block != who.block) | (self.write_epoch[units] == who.epoch)
        reader, block = self.reader[units], self.reading_block[units]
        alone = (reader == self.NOBODY) | (reader == who.warp)
        alone |= (block == who.block) & (self.read_epoch[units] != who.epoch)
        self._mark(self.reader, units, np.where(alone, who.warp, self.SEVERAL))
        alone = (block == self.NOBODY) | (block == who.block)
        self._mark(self.reading_block, units, np.where(alone, who.block, self.SEVERAL))
        self.read_epoch[units] = who.epoch
        return bool(race.any())

    def write(self, units: Array, who: Who, unchanged: Array) -> bool:
        """Note that these threads write, and say whether another warp has read or written one unordered.

        Threads that hold the same number may all write it: where the memory is `unchanged` no writer is disturbed.
        """
        writer, reader = self.writer[units], self.reader[units]
        race = (writer != self.NOBODY) & (writer != who.warp) & ~unchanged
        race &= (writer // self.warps_a_block != who.block) | (self.write_epoch[units] == who.epoch)
        race |= (reader != self.NOBODY) & (
            (self.reading_block[units] != who.block)
            | ((reader != who.warp) & (self.read_epoch[units] == who.epoch) & ~unchanged)
        )
        self.writer[units], self.write_epoch[units] = who.warp, who.epoch
        return bool(race.any())

    def by_others(self, units: Array, who: Who) -> Array:
        """Where another warp has written last."""
        return self.writer[units] != who.warp

    def _mark(self, of: Array, units: Array, mark: Array) -> None:
        of[units] = mark
        # A unit that several of these threads have.
        of[units[of[units] != mark]] = self.SEVERAL


class Memory(ABC):
    """Bytes that all threads of a block can touch. Every access is checked: its place, its alignment, and for races.

    Attributes:
        views: the bytes as unsigned integers of each size.
        accesses: who has touched what; None: not looked at.
    """

    views: dict[int, Array]
    accesses: Accesses | None

    @abstractmethod
    def locate(self, addresses: Array, size: int, who: Who, what: str) -> tuple[Array, Array]:
        """The first of `size` bytes in `views`, and in `accesses`; a Fault for bytes that are not there."""

    def load(self, addresses: Array, size: int, count: int, who: Who, what: str = "load") -> list[Array]:
        """`count` neighboring integers of `size` bytes each."""
        places, marks = self._checked(addresses, size * count, who, what)
        if self.accesses is not None and self.accesses.read(*_units(marks, size * count, who)):
            raise Fault(f"{what} of what another warp writes, without a barrier between them")
        return [self.views[size][places // size + one] for one in range(count)]

    def store(self, addresses: Array, values: list[Array], size: int, who: Who, what: str = "store") -> None:
        """Neighboring integers of `size` bytes each, one of each of `values`."""
        total = size * len(values)
        places, marks = self._checked(addresses, total, who, what)
        view = self.views[size]

        def held() -> Array:
            """Whether each pair of bytes is what is to be written; single bytes share a pair with others."""
            if size < Accesses.UNIT:
                return np.ones(len(places), bool)
            same = np.stack([view[places // size + one] == value for one, value in enumerate(values)], 1)
            return np.repeat(same.reshape(-1), size // Accesses.UNIT)

        race, units, each = False, places, who
        if self.accesses is not None:
            units, each = _units(marks, total if size >= Accesses.UNIT else size, who)
            race = self.accesses.write(units, each, held())
        for one, value in enumerate(values):
            view[places // size + one] = value
        if self.accesses is not None:
            # Of two warps at once only one has written. Threads of one warp may differ, as the hardware chooses one of
            # them: Triton lets all of them store a sum that they have in common, whose last bit need not be the same.
            race |= bool((self.accesses.by_others(units, each) & ~held()).any())
        if race:
            raise Fault(f"{what} over what another warp reads or writes, without a barrier between them")

    def _checked(self, addresses: Array, size: int, who: Who, what: str) -> tuple[Array, Array]:
        odd = addresses % size != 0
        if odd.any():
            raise Fault(f"{what} of {size} bytes at {int(addresses[odd][0]):#x}, which {size} does not divide")
        return self.locate(addresses, size, who, what)


def _units(marks: Array, size: int, who: Who) -> tuple[Array, Who]:
    count = max(1, size // Accesses.UNIT)
    return (marks[:, None] // Accesses.UNIT + np.arange(count)).reshape(-1), who.repeated(count)


@dataclass(frozen=True)
class Argument:
    """A part of global memory that a kernel may touch: from the address `start` up to `end`."""

    start: int
    end: int
    name: str


class _AddressSpace:
    __array_interface__: ClassVar = {
        "shape": (2**47 - LOWEST_ADDRESS,),
        "typestr": "|u1",
        "data": (LOWEST_ADDRESS, False),
        "version": 3,
    }


class GlobalMemory(Memory):
    """The memory of this process, of which a kernel may touch its arguments and nothing else."""

    _bytes: ClassVar[Array] = np.asarray(_AddressSpace())

    def __init__(self, arguments: list[Argument], warps_a_block: int) -> None:
        self.arguments = _merged(arguments)
        self.views = {size: self._bytes.view(kind) for size, kind in UNSIGNED.items()}
        self.starts = np.array([one.start for one in self.arguments], np.uint64)
        self.ends = np.array([one.end for one in self.arguments], np.uint64)
        # Each argument starts at a unit of its own.
        sizes = [one.end - one.start + 2 * Accesses.UNIT for one in self.arguments]
        self.marks = np.cumsum([0, *(size // Accesses.UNIT * Accesses.UNIT for size in sizes)])
        units = int(self.marks[-1]) // Accesses.UNIT
        self.accesses = Accesses(units, warps_a_block) if units <= MOST_UNITS else None

    def locate(self, addresses: Array, size: int, who: Who, what: str) -> tuple[Array, Array]:
        which = np.searchsorted(self.starts, addresses, "right") - 1
        outside = (which < 0) | (addresses + np.uint64(size) > self.ends[which])
        if outside.any():
            first = int(np.flatnonzero(outside)[0])
            near = self.arguments[max(int(which[first]), 0)]
            place = int(addresses[first]) - near.start
            raise Fault(
                f"{what} of {size} bytes outside of every argument: byte {place} of {near.name}, which has "
                f"{near.end - near.start}; {int(outside.sum())} threads of block {int(who.block[first])} and others"
            )
        marks = self.marks[which] + (addresses - self.starts[which]).astype(np.int64)
        return addresses.astype(np.int64) - LOWEST_ADDRESS, marks


def _merged(arguments: list[Argument]) -> list[Argument]:
    """In the order of their addresses, and those that overlap as one."""
    found: list[Argument] = []
    for argument in sorted(arguments, key=lambda one: (one.start, one.end)):
        if found and argument.start < found[-1].end:
            last = found.pop()
            argument = Argument(last.start, max(last.end, argument.end), f"{last.name} and {argument.name}")
        found.append(argument)
    return found


@dataclass
class _Copy:
    """A `cp.async` on its way: what each thread copies where, and in which of its block's groups."""

    offsets: Array
    data: Array
    who: Who
    group: Array


class SharedMemory(Memory):
    """The shared memory of each of `blocks` blocks, `size` bytes; NaN where nothing was written.

    Asynchronous copies arrive when they are waited for, and not before: until then there is NaN.
    """

    def __init__(self, size: int, blocks: Array, warps_a_block: int) -> None:
        # A multiple of the largest access, so that no access is of two blocks.
        self.size, self.first = -(-max(size, 16) // 16) * 16, int(blocks[0])
        every = np.full(len(blocks) * self.size, 0xFF, np.uint8)
        self.views = {size: every.view(kind) for size, kind in UNSIGNED.items()}
        self.accesses = Accesses(len(every) // Accesses.UNIT, warps_a_block)
        self.groups = np.zeros(len(blocks), np.int64)
        self.copies: list[_Copy] = []

    def locate(self, addresses: Array, size: int, who: Who, what: str) -> tuple[Array, Array]:
        offsets = addresses.astype(np.int64)
        if len(offsets) and (int(offsets.min()) < 0 or int(offsets.max()) + size > self.size):
            raise Fault(f"{what} of {size} bytes at {int(offsets.max())} of {self.size} bytes of shared memory")
        places = offsets + (who.block.astype(np.int64) - self.first) * self.size
        return places, places

    def start_copy(self, offsets: Array, data: Array, who: Who) -> None:
        """`data` `[threads, words]` on its way to `offsets`."""
        unknown = np.full(len(offsets), 0xFFFFFFFF, np.uint32)
        self.store(offsets, [unknown] * data.shape[1], 4, who, "cp.async")
        self.copies.append(_Copy(offsets, data, who, self.groups[who.block - self.first]))

    def end_group(self, blocks: Array) -> None:
        self.groups[blocks - self.first] += 1

    def wait(self, blocks: Array, left: int, epochs: Array) -> None:
        """Let all groups of these blocks arrive but the last `left`; `epochs`: barriers that each block has passed."""
        waiting, still = np.zeros(len(self.groups), bool), []
        waiting[blocks - self.first] = True
        for copy in self.copies:
            block = copy.who.block - self.first
            done = waiting[block] & (copy.group < self.groups[block] - left)
            if done.any():
                who = Who(copy.who.block[done], copy.who.warp[done], epochs[block[done]])
                columns = [np.ascontiguousarray(copy.data[done, word]) for word in range(copy.data.shape[1])]
                self.store(copy.offsets[done], columns, 4, who, "the arrival of cp.async")
            if not done.all():
                late = ~done
                still.append(_Copy(copy.offsets[late], copy.data[late], copy.who.at(late), copy.group[late]))
        self.copies = still
