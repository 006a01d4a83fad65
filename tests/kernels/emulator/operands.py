"""The operands of an instruction: registers, constants, lists and addresses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from .formats import FORMATS, UNSIGNED, Array, Format
from .machine import Threads, width_of
from .ptx import Fault

Operand: TypeAlias = Callable[[Threads], Array]
ADDRESS = re.compile(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]")


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


def address(text: str, size: int) -> Operand:
    """Of `[base + offset]`."""
    found = ADDRESS.fullmatch(text)
    if found is None:
        raise Fault(f"not an address: {text!r}")
    base, offset = operand(found.group(1), FORMATS[f"b{8 * size}"]), int(found.group(2) or "0", 0)
    step = UNSIGNED[size](offset & (2 ** (8 * size) - 1))
    return lambda threads: threads.spread(base(threads) + step)
