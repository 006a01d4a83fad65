"""Instructions between threads, memory and tensor cores."""

from __future__ import annotations

import numpy as np

from . import matrices
from .formats import FORMATS, SIGNED, UNSIGNED
from .machine import Step, Threads, width_of
from .operands import address, listed, operand
from .ptx import Fault, Instruction, unknown


def load(instruction: Instruction) -> Step:
    _, space, *_, word = instruction.parts
    form = FORMATS[word]
    if space == "param":
        name = instruction.operands[1].strip("[] ")
        target = instruction.operands[0]
        wide = width_of(target)

        def parameter(threads: Threads) -> None:
            bits = np.frombuffer(threads.parameters[name][: form.size].ljust(form.size, b"\0"), UNSIGNED[form.size])
            if word[0] == "s":
                bits = bits.view(SIGNED[form.size]).astype(SIGNED[wide]).view(UNSIGNED[wide])
            threads.assign(target, bits)

        return parameter
    targets = listed(instruction.operands[0])
    where = address(instruction.operands[1], 8 if space == "global" else 4)

    def step(threads: Threads) -> None:
        some = threads.guarded(instruction)
        memory = threads.memory if space == "global" else threads.shared
        found = memory.load(where(threads)[some], form.size, len(targets), threads.who().at(some))
        for target, bits in zip(targets, found, strict=True):
            threads.assign(target, bits, some if instruction.guard else None)

    return step


def store(instruction: Instruction) -> Step:
    _, space, *_, word = instruction.parts
    form = FORMATS[word]
    where = address(instruction.operands[0], 8 if space == "global" else 4)
    sources = [operand(name, form) for name in listed(instruction.operands[1])]

    def step(threads: Threads) -> None:
        some = threads.guarded(instruction)
        memory = threads.memory if space == "global" else threads.shared
        values = [threads.spread(source(threads))[some] for source in sources]
        memory.store(where(threads)[some], values, form.size, threads.who().at(some))

    return step


def copy(instruction: Instruction) -> Step:
    if instruction.opcode == "cp.async.commit_group":
        return Threads.end_group_of_copies
    if instruction.opcode == "cp.async.wait_group":
        left = int(instruction.operands[0], 0)
        return lambda threads: threads.wait_for_copies(left)
    to, source, size, *taken = instruction.operands
    count = int(size, 0)
    target, given = address(to, 4), address(source, 8)
    read = operand(taken[0] if taken else size, FORMATS["b32"])

    def step(threads: Threads) -> None:
        some = threads.guarded(instruction)
        who, taken = threads.who().at(some), threads.spread(read(threads))[some]
        if not np.isin(taken, (0, count)).all():
            raise Fault("the emulator does not know a cp.async of a part")
        # What is not read is zero.
        data, there = np.zeros((len(taken), count // 4), np.uint32), np.flatnonzero(taken)
        words = threads.memory.load(given(threads)[some][there], 4, count // 4, who.at(there), "cp.async")
        data[there] = np.stack(words, 1)
        threads.shared.start_copy(target(threads)[some], data, who)

    return step


def barrier(instruction: Instruction) -> Step:
    if instruction.opcode != "bar.sync" or instruction.operands != ("0",):
        raise unknown(instruction)
    return Threads.barrier


def shuffle(instruction: Instruction) -> Step:
    target, source, place, clamp, _ = instruction.operands
    form = FORMATS["b32"]
    kind = instruction.parts[2]
    if int(clamp, 0) != 31 or kind not in ("bfly", "idx"):
        raise unknown(instruction)
    value, other = operand(source, form), operand(place, form)
    lanes = np.arange(32)

    def step(threads: Threads) -> None:
        warps, chosen = threads.in_warps(value(threads)), threads.in_warps(other(threads)).astype(np.int64)
        chosen = lanes ^ chosen if kind == "bfly" else chosen & 31
        threads.assign(target, np.take_along_axis(warps, chosen, 1).reshape(-1))

    return step


def reduce(instruction: Instruction) -> Step:
    function = {"max": np.max, "min": np.min}[instruction.parts[2]]
    form = FORMATS[instruction.parts[3]]
    target, value = instruction.operands[0], operand(instruction.operands[1], form)

    def step(threads: Threads) -> None:
        found = function(form.read(threads.in_warps(value(threads))), 1)
        threads.assign(target, np.repeat(form.write(found), 32))

    return step


def matrix(instruction: Instruction) -> Step:
    """Between shared memory and registers, eight rows of sixteen bytes at a time."""
    loads, transposed = instruction.parts[0] == "ldmatrix", "trans" in instruction.parts
    registers, place = instruction.operands if loads else instruction.operands[::-1]
    names, where = listed(registers), address(place, 4)
    if loads:
        return lambda threads: matrices.load(threads, names, where(threads), transposed)
    sources = [operand(name, FORMATS["b32"]) for name in names]
    return lambda threads: matrices.store(
        threads, [threads.spread(source(threads)) for source in sources], where(threads), transposed
    )


def product(instruction: Instruction) -> Step:
    """`mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`"""
    *_, result, left, right, summand = instruction.parts
    if (result, summand) != ("f32", "f32") or left != right or instruction.parts[4:6] != ["row", "col"]:
        raise unknown(instruction)
    targets, *factors = (listed(text) for text in instruction.operands)
    a, b, c = ([operand(name, FORMATS["b32"]) for name in names] for names in factors)

    def step(threads: Threads) -> None:
        x, y, z = ([threads.spread(one(threads)) for one in several] for several in (a, b, c))
        matrices.multiply(threads, targets, x, y, z, left)

    return step


def group_product(instruction: Instruction) -> Step:
    """`wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16`; done at once, whoever waits for it."""
    if instruction.parts[1] in ("commit_group", "wait_group"):
        return lambda _: None
    *_, shape, result, left, right = instruction.parts
    targets, (first, second) = listed(instruction.operands[0]), instruction.operands[1:3]
    adds, *signs = instruction.operands[3:]
    numbers = [int(text, 0) for text in signs]
    if result != "f32" or left != right or numbers[:2] != [1, 1]:
        raise unknown(instruction)
    from_registers = first.startswith("{")
    a = [operand(name, FORMATS["b32" if from_registers else "b64"]) for name in listed(first)]
    b, keeps = operand(second, FORMATS["b64"]), operand(adds, FORMATS["pred"])
    columns = int(shape[shape.index("n") + 1 : shape.index("k")])
    # Of the factors in shared memory: whether their rows, not the summation, are contiguous.
    across = [bool(number) for number in numbers[2:]] or [False] * (1 if from_registers else 2)

    def step(threads: Threads) -> None:
        matrices.multiply_in_groups(
            threads, targets, [threads.spread(one(threads)) for one in a], threads.spread(b(threads)),
            threads.spread(keeps(threads)), columns, left, across,
        )  # fmt: skip

    return step
