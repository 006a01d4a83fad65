"""What each instruction does: a step for every line of a program, made once."""

from __future__ import annotations

from collections.abc import Callable

from . import arithmetic, transfers
from .arithmetic import ARITHMETIC, BITWISE
from .machine import Step
from .ptx import Fault, Instruction, unknown

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
        raise unknown(instruction)
    return make(instruction)


_MAKERS: dict[str, Callable[[Instruction], Step]] = {
    **dict.fromkeys(ARITHMETIC, arithmetic.arithmetic),
    **dict.fromkeys(BITWISE, arithmetic.bitwise),
    **dict.fromkeys(("shl", "shr"), arithmetic.shift),
    **dict.fromkeys(("ldmatrix", "stmatrix"), transfers.matrix),
    "not": arithmetic.invert,
    "bfe": arithmetic.extract_field,
    "bfi": arithmetic.insert_field,
    "prmt": arithmetic.permute,
    "selp": arithmetic.select,
    "setp": arithmetic.compare,
    "cvt": arithmetic.convert,
    "mov": arithmetic.move,
    "ld": transfers.load,
    "st": transfers.store,
    "cp": transfers.copy,
    "bar": transfers.barrier,
    "shfl": transfers.shuffle,
    "redux": transfers.reduce,
    "mma": transfers.product,
    "wgmma": transfers.group_product,
}
