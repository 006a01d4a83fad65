"""Instructions that make a number of a thread from numbers of the same thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .formats import FORMATS, SIGNED, UNSIGNED, Array, Format, flushed, fused, truncated_division, truncated_remainder
from .machine import Step, Threads
from .operands import listed, operand
from .ptx import Fault, Instruction, unknown

# Beside NaN all of them are false, but those that end in "u".
COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": lambda x, y: (x < y) | (x > y), "neu": np.not_equal, "equ": lambda x, y: ~((x < y) | (x > y)),
    "ltu": lambda x, y: ~(x >= y), "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y), "geu": lambda x, y: ~(x < y), "num": lambda x, y: (x == x) & (y == y),
}  # fmt: skip
ARITHMETIC: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": fused, "mad": lambda x, y, z: x * y + z,
    "neg": np.negative, "abs": np.abs, "ex2": np.exp2, "sqrt": np.sqrt, "div": np.divide, "rem": truncated_remainder,
    # Of a number and NaN the number.
    "max": lambda *of: of[0] if len(of) == 1 else np.fmax(of[0], ARITHMETIC["max"](*of[1:])),
    "min": lambda *of: of[0] if len(of) == 1 else np.fmin(of[0], ARITHMETIC["min"](*of[1:])),
}  # fmt: skip
BITWISE: dict[str, Callable[..., Array]] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
# Words of an opcode beside its types. Numbers are always rounded to the nearest, and what may be approximate is exact.
SILENT = {"rn", "approx", "full", "lo", "ftz", "wide", "relu"}


def _elementwise(function: Callable[..., Array], instruction: Instruction, result: Format, given: list[Format]) -> Step:
    target, *sources = instruction.operands
    operands = [operand(text, form) for text, form in zip(sources, given, strict=True)]

    def step(threads: Threads) -> None:
        numbers = [form.read(source(threads)) for form, source in zip(given, operands, strict=True)]
        threads.assign(target, result.write(function(*numbers)))

    return step


def arithmetic(instruction: Instruction) -> Step:
    head, *words = instruction.parts
    kinds = [FORMATS[word] for word in words if word in FORMATS]
    strange = [word for word in words if word not in FORMATS and word not in SILENT]
    if strange or ("relu" in words and words[-1] != "s32"):
        raise Fault(f"the emulator does not know {'.'.join(strange or words)} of {instruction.text!r}")
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


def bitwise(instruction: Instruction) -> Step:
    form = FORMATS[instruction.parts[1]]
    return _elementwise(BITWISE[instruction.parts[0]], instruction, form, [form, form])


def invert(instruction: Instruction) -> Step:
    form = FORMATS[instruction.parts[1]]
    return _elementwise(np.invert, instruction, form, [form])


def shift(instruction: Instruction) -> Step:
    """`shl`, `shr`: by the width or more nothing is left, but the sign of a signed number."""
    head, word = instruction.parts
    form = FORMATS[word]
    bits, number = 8 * form.size, _kind(form).type
    move = np.left_shift if head == "shl" else np.right_shift
    emptied = word[0] != "s" or head == "shl"

    def shifted(x: Array, count: Array) -> Array:
        moved = move(x, np.minimum(count, bits - 1).astype(number))
        return np.where(count < bits, moved, number(0)) if emptied else moved

    return _elementwise(shifted, instruction, form, [form, FORMATS["u32"]])


def _field(instruction: Instruction) -> tuple[Instruction, int, int]:
    """The instruction without the first bit and the number of bits of its field, and these two, which are constants."""
    *plain, start, length = instruction.operands
    if start.startswith("%") or length.startswith("%") or int(length, 0) < 1 or int(start, 0) + int(length, 0) > 32:
        raise unknown(instruction)
    return (
        Instruction(instruction.text, "", False, instruction.opcode, tuple(plain)), int(start, 0), int(length, 0)
    )  # fmt: skip


def extract_field(instruction: Instruction) -> Step:
    plain, start, length = _field(instruction)
    up, down = 32 - start - length, 32 - length
    kind = SIGNED[4] if instruction.parts[1] == "s32" else UNSIGNED[4]
    form = FORMATS["b32"]
    return _elementwise(lambda x: ((x << np.uint32(up)).view(kind) >> kind(down)).view(np.uint32), plain, form, [form])


def insert_field(instruction: Instruction) -> Step:
    plain, start, length = _field(instruction)
    field = np.uint32((2**length - 1) << start)
    form = FORMATS["b32"]
    return _elementwise(lambda x, y: (x << np.uint32(start)) & field | y & ~field, plain, form, [form, form])


def permute(instruction: Instruction) -> Step:
    """`prmt`: each byte is one of the eight of two numbers, or its sign; four bits of the selector say which."""
    if instruction.opcode != "prmt.b32":
        raise unknown(instruction)
    form = FORMATS["b32"]

    def permuted(x: Array, y: Array, selector: Array) -> Array:
        x, y, selector = np.broadcast_arrays(x, y, selector)
        choice = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
        chosen = np.take_along_axis(np.stack([x, y], 1).view(np.uint8), choice & 7, 1)
        return np.where(choice & 8, chosen // 128 * 255, chosen).astype(np.uint8).view(np.uint32)[:, 0]

    return _elementwise(permuted, instruction, form, [form] * 3)


def select(instruction: Instruction) -> Step:
    bits = FORMATS[f"b{8 * FORMATS[instruction.parts[1]].size}"]
    return _elementwise(lambda x, y, first: np.where(first, x, y), instruction, bits, [bits, bits, FORMATS["pred"]])


def compare(instruction: Instruction) -> Step:
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


def convert(instruction: Instruction) -> Step:
    *_, result, given = instruction.parts
    to, source = FORMATS[result], FORMATS[given]
    if to.packed:
        # The first operand becomes the upper half.
        return _elementwise(
            lambda high, low: np.stack(np.broadcast_arrays(low, high), 1), instruction, to, [source, source]
        )
    if result[0] in "us" and given[0] not in "us":
        if "rzi" not in instruction.parts:
            raise unknown(instruction)
        return _elementwise(lambda x: _whole(x, _kind(to)), instruction, to, [source])
    kind = np.dtype(np.float32) if result in ("f16", "bf16") else _kind(to)
    return _elementwise(lambda x: x.astype(kind), instruction, to, [source])


def _whole(x: Array, kind: Any) -> Array:
    """Towards zero; of NaN zero, and beyond the range its end."""
    limits, number = np.iinfo(kind), np.trunc(np.nan_to_num(x, nan=0.0))
    low, high = number <= float(limits.min), number >= float(limits.max)
    inside = np.where(low | high, 0.0, number).astype(kind)
    return np.where(low, kind.type(limits.min), np.where(high, kind.type(limits.max), inside))


def move(instruction: Instruction) -> Step:
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
