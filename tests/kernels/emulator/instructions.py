"""What each instruction does: a function for every line of a program, made once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from . import matrices
from .formats import (
    FORMATS,
    SIGNED,
    UNSIGNED,
    Array,
    Format,
    flushed,
    fused,
    truncated_division,
    truncated_remainder,
)
from .machine import Step, Threads, width_of
from .ptx import Fault, Instruction

Operand: TypeAlias = Callable[[Threads], Array]
ADDRESS = re.compile(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]")

# Beside NaN all of them are false, but those that end in "u".
COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": lambda x, y: (x < y) | (x > y), "neu": np.not_equal, "equ": lambda x, y: ~((x < y) | (x > y)),
    "ltu": lambda x, y: ~(x >= y), "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y), "geu": lambda x, y: ~(x < y),
}  # fmt: skip
ARITHMETIC: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": fused, "mad": lambda x, y, z: x * y + z,
    "neg": np.negative, "abs": np.abs, "ex2": np.exp2, "div": np.divide, "rem": truncated_remainder,
    # Of a number and NaN the number.
    "max": lambda *of: of[0] if len(of) == 1 else np.fmax(of[0], ARITHMETIC["max"](*of[1:])),
    "min": lambda *of: of[0] if len(of) == 1 else np.fmin(of[0], ARITHMETIC["min"](*of[1:])),
}  # fmt: skip
BITWISE: dict[str, Callable[..., Array]] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
# Words of an opcode that say nothing the emulator has to do something about: how it rounds is the nearest one always,
# and what is said to be approximate is computed exactly.
SILENT = {"rn", "approx", "full", "lo", "sync", "aligned", "ftz", "wide"}
ORDERING = {"bar.warp.sync", "fence.proxy.async.shared::cta", "wgmma.fence.sync.aligned"}


def translate(instruction: Instruction) -> Step:
    """The step that executes the instruction; a Fault for one that the emulator does not know."""
    head = instruction.parts[0]
    if instruction.guard and head not in ("ld", "st", "cp"):
        raise Fault(f"the emulator does not know a guarded {instruction.text!r}")
    if instruction.opcode in ORDERING:
        return lambda _: None
    make = _MAKERS.get(head)
    if make is None:
        raise Fault(f"the emulator does not know {instruction.text!r}")
    return make(instruction)


def operand(text: str, form: Format) -> Operand:
    """Bits `[threads]`, or `[1]` of a constant, of the width of `form`."""
    if text.startswith(("%tid", "%ctaid", "%ntid", "%nctaid")):
        return lambda threads: threads.special(text)
    if text.startswith("%"):
        width = width_of(text)
        if width in (0, form.size):
            return lambda threads: threads.value(text)
        return lambda threads: threads.value(text).astype(UNSIGNED[form.size])
    constant = _constant(text, form.size)
    return lambda _: constant


def _constant(text: str, size: int) -> Array:
    if size == 0:
        return np.array([int(text, 0) != 0])
    if text == "global_smem":
        number = 0
    elif text.startswith(("0f", "0d")):
        number = int(text[2:], 16)
    else:
        number = int(text.rstrip("U"), 0)
    return np.array([number & (2 ** (8 * size) - 1)], UNSIGNED[size])


def listed(text: str) -> list[str]:
    """The registers of `{%r1, %r2}`, or the one that stands alone."""
    return [one.strip() for one in text.strip("{} ").split(",")]


def _elementwise(function: Callable[..., Array], instruction: Instruction, result: Format, given: list[Format]) -> Step:
    target, *sources = instruction.operands
    operands = [operand(text, form) for text, form in zip(sources, given, strict=True)]

    def step(threads: Threads) -> None:
        numbers = [form.read(source(threads)) for form, source in zip(given, operands, strict=True)]
        threads.assign(target, result.write(function(*numbers)))

    return step


def _arithmetic(instruction: Instruction) -> Step:
    head, *words = instruction.parts
    kinds = [FORMATS[word] for word in words if word in FORMATS]
    unknown = [word for word in words if word not in FORMATS and word not in SILENT and word != "relu"]
    if unknown or ("relu" in words and words[-1] != "s32"):
        raise Fault(f"the emulator does not know {'.'.join(unknown or words)} of {instruction.text!r}")
    function, number = ARITHMETIC[head], len(instruction.operands) - 1
    form = kinds[-1]
    if words[-1][0] in "us":
        function = {"div": truncated_division, "max": np.maximum, "min": np.minimum}.get(head, function)
        if "relu" in words:
            smaller = function
            return _elementwise(lambda x, y: np.maximum(smaller(x, y), 0), instruction, form, [form, form])
    if "wide" in words:
        wide = FORMATS[f"{words[-1][0]}{16 * form.size}"]
        return _elementwise(
            lambda x, y, *z: ARITHMETIC[head](x.astype(_kind(wide)), y.astype(_kind(wide)), *z),
            instruction, wide, [form, form, wide][:number],
        )  # fmt: skip
    if head in ("abs", "neg") and words[-1] not in ("f32", "f64") and words[-1][0] in "fb":
        # By the sign's bit, which does not touch a NaN either.
        return _sign(instruction, head, form)
    if len(kinds) == 2:
        # `fma.rn.f32.bf16`: the factors, or the first summand, are narrow.
        narrow = number - 1
        return _elementwise(function, instruction, kinds[0], [*[form] * narrow, kinds[0]])
    if "ftz" in words:
        plain = function
        return _elementwise(lambda *x: flushed(plain(*map(flushed, x))), instruction, form, [form] * number)
    return _elementwise(function, instruction, form, [form] * number)


def _kind(form: Format) -> Any:
    return form.read(np.zeros(1, UNSIGNED[form.size])).dtype


def _sign(instruction: Instruction, head: str, form: Format) -> Step:
    bits = FORMATS[f"b{8 * form.size}"]
    signs = UNSIGNED[form.size](0x80008000 if form.packed else 0x8000)
    function = (lambda x: x & ~signs) if head == "abs" else (lambda x: x ^ signs)
    return _elementwise(function, instruction, bits, [bits])


def _bitwise(instruction: Instruction) -> Step:
    form = FORMATS[instruction.parts[1]]
    return _elementwise(BITWISE[instruction.parts[0]], instruction, form, [form, form])


def _not(instruction: Instruction) -> Step:
    form = FORMATS[instruction.parts[1]]
    return _elementwise(np.invert, instruction, form, [form])


def _shift(instruction: Instruction) -> Step:
    head, word = instruction.parts
    form = FORMATS[word]
    target, source, count = instruction.operands
    by = int(count, 0)  # LLVM writes shifts by a register as such of 64 bits or masks them; neither has been seen
    if not 0 <= by < 8 * form.size:
        raise Fault(f"the emulator does not know a shift by so much: {instruction.text!r}")
    shift = np.left_shift if head == "shl" else np.right_shift
    plain = Instruction(instruction.text, "", False, instruction.opcode, (target, source))
    kind = _kind(form)
    return _elementwise(lambda x: shift(x, kind.type(by)), plain, form, [form])


def _bit_field(instruction: Instruction) -> Step:
    target, source, start, length = instruction.operands
    first, last = 32 - int(start, 0) - int(length, 0), 32 - int(length, 0)
    kind = SIGNED[4] if instruction.parts[1] == "s32" else UNSIGNED[4]
    form = FORMATS["b32"]
    plain = Instruction(instruction.text, "", False, instruction.opcode, (target, source))
    return _elementwise(
        lambda x: ((x << np.uint32(first)).view(kind) >> kind(last)).view(np.uint32), plain, form, [form]
    )


def _permute(instruction: Instruction) -> Step:
    target, low, high, selector = instruction.operands
    choice = int(selector.rstrip("U"), 0)
    nibbles = [choice >> 4 * place & 15 for place in range(4)]
    if max(nibbles) > 7:
        raise Fault(f"the emulator does not know the selector of {instruction.text!r}")
    form = FORMATS["b32"]

    def step(x: Array, y: Array) -> Array:
        x, y = np.broadcast_arrays(x, y)
        eight = np.stack([x, y], 1).view(np.uint8)
        return np.ascontiguousarray(eight[:, nibbles]).view(np.uint32)[:, 0]

    plain = Instruction(instruction.text, "", False, instruction.opcode, (target, low, high))
    return _elementwise(step, plain, form, [form, form])


def _select(instruction: Instruction) -> Step:
    bits = FORMATS[f"b{8 * FORMATS[instruction.parts[1]].size}"]
    return _elementwise(lambda x, y, first: np.where(first, x, y), instruction, bits, [bits, bits, FORMATS["pred"]])


def _compare(instruction: Instruction) -> Step:
    _, comparison, word = instruction.parts
    form, compare = FORMATS[word], COMPARISONS[comparison]
    targets = instruction.operands[0].split("|")
    x, y = (operand(text, form) for text in instruction.operands[1:])

    def step(threads: Threads) -> None:
        found = compare(form.read(x(threads)), form.read(y(threads)))
        columns = found.T if form.packed else [found]
        for target, column in zip(targets, columns, strict=True):
            threads.assign(target, column)

    return step


def _convert(instruction: Instruction) -> Step:
    *_, result, given = instruction.parts
    to, source = FORMATS[result], FORMATS[given]
    if to.packed:
        # The first operand becomes the upper half.
        return _elementwise(
            lambda high, low: np.stack(np.broadcast_arrays(low, high), 1), instruction, to, [source, source]
        )
    if result[0] in "us" and given[0] not in "us":
        raise Fault(f"the emulator does not know {instruction.text!r}")
    kind = np.dtype(np.float32) if result in ("f16", "bf16") else _kind(to)
    return _elementwise(lambda x: x.astype(kind), instruction, to, [source])


def _move(instruction: Instruction) -> Step:
    form = FORMATS[instruction.parts[1]]
    target, source = instruction.operands
    if target.startswith("{"):
        parts = listed(target)
        whole = operand(source, form)
        part = UNSIGNED[form.size // len(parts)]

        def split(threads: Threads) -> None:
            columns = threads.spread(whole(threads)).view(part).reshape(-1, len(parts))
            for column, name in enumerate(parts):
                threads.assign(name, columns[:, column])

        return split
    if source.startswith("{"):
        parts = listed(source)
        pieces = [operand(name, FORMATS[f"b{8 * form.size // len(parts)}"]) for name in parts]

        def join(threads: Threads) -> None:
            columns = np.stack([threads.spread(piece(threads)) for piece in pieces], 1)
            threads.assign(target, columns.view(UNSIGNED[form.size])[:, 0])

        return join
    value = operand(source, form)
    return lambda threads: threads.assign(target, value(threads))


def address(text: str, size: int) -> Operand:
    """Of `[base + offset]`."""
    found = ADDRESS.fullmatch(text)
    if found is None:
        raise Fault(f"not an address: {text!r}")
    base, offset = operand(found.group(1), FORMATS[f"b{8 * size}"]), int(found.group(2) or "0", 0)
    step = UNSIGNED[size](offset & (2 ** (8 * size) - 1))
    return lambda threads: threads.spread(base(threads) + step)


def _load(instruction: Instruction) -> Step:
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


def _store(instruction: Instruction) -> Step:
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


def _copy(instruction: Instruction) -> Step:
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


def _barrier(instruction: Instruction) -> Step:
    if instruction.opcode != "bar.sync" or instruction.operands != ("0",):
        raise Fault(f"the emulator does not know {instruction.text!r}")
    return Threads.barrier


def _shuffle(instruction: Instruction) -> Step:
    target, source, place, clamp, _ = instruction.operands
    form = FORMATS["b32"]
    kind = instruction.parts[2]
    if int(clamp, 0) != 31 or kind not in ("bfly", "idx"):
        raise Fault(f"the emulator does not know {instruction.text!r}")
    value, other = operand(source, form), operand(place, form)
    lanes = np.arange(32)

    def step(threads: Threads) -> None:
        warps, chosen = threads.in_warps(value(threads)), threads.in_warps(other(threads)).astype(np.int64)
        chosen = lanes ^ chosen if kind == "bfly" else chosen & 31
        threads.assign(target, np.take_along_axis(warps, chosen, 1).reshape(-1))

    return step


def _reduce(instruction: Instruction) -> Step:
    function = {"max": np.max, "min": np.min}[instruction.parts[2]]
    form = FORMATS[instruction.parts[3]]
    target, value = instruction.operands[0], operand(instruction.operands[1], form)

    def step(threads: Threads) -> None:
        found = function(form.read(threads.in_warps(value(threads))), 1)
        threads.assign(target, np.repeat(form.write(found), 32))

    return step


def _matrix(instruction: Instruction) -> Step:
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


def _product(instruction: Instruction) -> Step:
    """`mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`"""
    *_, result, left, right, summand = instruction.parts
    if (result, summand) != ("f32", "f32") or left != right or instruction.parts[4:6] != ["row", "col"]:
        raise Fault(f"the emulator does not know {instruction.text!r}")
    targets, *factors = (listed(text) for text in instruction.operands)
    a, b, c = ([operand(name, FORMATS["b32"]) for name in names] for names in factors)

    def step(threads: Threads) -> None:
        x, y, z = ([threads.spread(one(threads)) for one in several] for several in (a, b, c))
        matrices.multiply(threads, targets, x, y, z, left)

    return step


def _group_product(instruction: Instruction) -> Step:
    """`wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16`; done at once, whoever waits for it."""
    if instruction.parts[1] in ("commit_group", "wait_group"):
        return lambda _: None
    *_, shape, result, left, right = instruction.parts
    targets, (first, second) = listed(instruction.operands[0]), instruction.operands[1:3]
    adds, *signs = instruction.operands[3:]
    numbers = [int(text, 0) for text in signs]
    if result != "f32" or left != right or numbers[:2] != [1, 1]:
        raise Fault(f"the emulator does not know {instruction.text!r}")
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


_MAKERS: dict[str, Callable[[Instruction], Step]] = {
    **dict.fromkeys(ARITHMETIC, _arithmetic),
    **dict.fromkeys(BITWISE, _bitwise),
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("ldmatrix", "stmatrix"), _matrix),
    "not": _not,
    "bfe": _bit_field,
    "prmt": _permute,
    "selp": _select,
    "setp": _compare,
    "cvt": _convert,
    "mov": _move,
    "ld": _load,
    "st": _store,
    "cp": _copy,
    "bar": _barrier,
    "shfl": _shuffle,
    "redux": _reduce,
    "mma": _product,
    "wgmma": _group_product,
}
