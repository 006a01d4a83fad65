"""The threads of a launch: their registers, and the way they take through a program together."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from .formats import SIGNED, UNSIGNED, Array
from .memory import GlobalMemory, SharedMemory, Who
from .ptx import Fault, Instruction, Program

REGISTER = re.compile(r"%(rs|rd|r)\d+")
WIDTHS = {"rs": 2, "r": 4, "rd": 8}
WARP = 32


def width_of(register: str) -> int:
    """Bytes of a register, by its name; 0: a predicate."""
    found = REGISTER.fullmatch(register)
    return WIDTHS[found.group(1)] if found else 0


class Threads:
    """All threads of some blocks of a launch, one behind the other, each instruction executed by all of them at once.

    Where they part at a branch the two halves go on one after the other, up to where they meet again.

    Attributes:
        registers: `[active threads]` unsigned integers, or bool for a predicate, by name.
        active: which of all threads these are.
    """

    def __init__(
        self,
        program: Program,
        steps: list[list[Step]],
        parameters: dict[str, bytes],
        blocks: Array,
        grid: tuple[int, int, int],
        memory: GlobalMemory,
        shared_size: int,
    ) -> None:
        self.program, self.steps, self.parameters, self.grid, self.memory = program, steps, parameters, grid, memory
        self.blocks, self.warps_a_block = blocks, program.threads // WARP
        self.shared = SharedMemory(shared_size, blocks, self.warps_a_block)
        self.epochs = np.zeros(len(blocks), np.int32)
        self.registers: dict[str, Array] = {}
        self._activate(np.arange(len(blocks) * program.threads))

    def _activate(self, active: Array) -> None:
        self.active, self.count = active, len(active)
        place = active // self.program.threads
        self.thread = active % self.program.threads
        self.block = self.blocks[place]
        self._place = place
        self._warp = (self.block * self.warps_a_block + self.thread // WARP).astype(np.int32)
        self.whole_blocks, self.whole_warps = self._are_whole(self.program.threads), self._are_whole(WARP)

    def _are_whole(self, size: int) -> bool:
        """Whether all threads are active of each group of `size` of which any is."""
        if self.count % size:
            return False
        groups = self.active.reshape(-1, size)
        return not (groups[:, 0] % size).any() and bool((groups[:, -1] - groups[:, 0] == size - 1).all())

    def who(self) -> Who:
        return Who(self.block.astype(np.int32), self._warp, self.epochs[self._place])

    def special(self, name: str) -> Array:
        """`%tid.x`, `%ctaid.y`, …"""
        if name == "%tid.x":
            return self.thread.astype(np.uint32)
        x, y, _ = self.grid
        axes = {"x": self.block % x, "y": self.block // x % y, "z": self.block // (x * y)}
        if not name.startswith("%ctaid."):
            raise Fault(f"the emulator does not know the register {name}")
        return axes[name[-1]].astype(np.uint32)

    def spread(self, values: Array) -> Array:
        """The same for every thread, if it is one value; contiguous."""
        if len(values) != self.count:
            values = np.broadcast_to(values, (self.count, *values.shape[1:]))
        return np.ascontiguousarray(values)

    def value(self, register: str) -> Array:
        """Of a register; all bits set, so NaN, where nothing was assigned: LLVM leaves out what cannot matter."""
        found = self.registers.get(register)
        if found is None:
            width = width_of(register)
            return np.full(self.count, -1, SIGNED[width]).view(UNSIGNED[width]) if width else np.zeros(self.count, bool)
        return found

    def assign(self, register: str, bits: Array, index: Array | slice | None = None) -> None:
        """Give a register its value, or at `index` a value for each thread there; wider ones are filled with zeros."""
        if register == "_":
            return
        width = width_of(register)
        if width and width != bits.dtype.itemsize:
            bits = bits.astype(UNSIGNED[width])
        if index is None:
            self.registers[register] = self.spread(bits)
            return
        old = self.registers.get(register)
        new = np.zeros(self.count, bits.dtype) if old is None else old.copy()
        new[index] = bits
        self.registers[register] = new

    def guarded(self, instruction: Instruction) -> Array | slice:
        """The active threads whose guard lets them execute the instruction."""
        if not instruction.guard:
            return slice(None)
        return np.flatnonzero(self.value(instruction.guard) != instruction.negated)

    def barrier(self) -> None:
        if not self.whole_blocks:
            raise Fault("a barrier that not all threads of the block reach")
        self.epochs[np.unique(self._place)] += 1

    def end_group_of_copies(self) -> None:
        self.shared.end_group(np.unique(self.block))

    def wait_for_copies(self, left: int) -> None:
        self.shared.wait(np.unique(self.block), left, self.epochs)

    def in_warps(self, values: Array) -> Array:
        """`[warps, 32]`"""
        if not self.whole_warps:
            raise Fault("an instruction for whole warps that not all of their threads reach")
        return self.spread(values).reshape(-1, WARP)

    def run(self, place: int = 0, until: int = -1) -> None:
        """Execute from block `place` of the program on, up to its end or to `until`."""
        blocks = self.program.blocks
        while place not in (until, len(blocks)):
            for step in self.steps[place]:
                step(self)
            block = blocks[place]
            if block.branch is None:
                place = block.following[0]
                continue
            taken = self.value(block.branch.guard) != block.branch.negated
            if taken.all() or not taken.any():
                place = block.following[0 if taken.all() else 1]
                continue
            for following, choice in zip(block.following, (taken, ~taken), strict=True):
                self._run_some(np.flatnonzero(choice), following, block.meeting)
            place = block.meeting

    def _run_some(self, some: Array, place: int, until: int) -> None:
        everyone, registers = self.active, self.registers
        before = {name: values[some] for name, values in registers.items()}
        self.registers = dict(before)
        self._activate(everyone[some])
        self.run(place, until)
        changed, self.registers = self.registers, registers
        self._activate(everyone)
        for name, values in changed.items():
            if values is not before.get(name):
                self.assign(name, values, some)


Step: TypeAlias = Callable[[Threads], None]
