"""Instructions with their answers, in Alpaca's form."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdt_fast.errors import InputError
from cdt_fast.files import shown
from cdt_fast.sequence.data.rows import Row, column

_TASK = "Below is an instruction that describes a task"
_REQUEST = "Write a response that appropriately completes the request."


@dataclass(frozen=True)
class Instruction:
    """What is asked, the input it is asked about ("" for none), and the answer."""

    instruction: str
    input: str
    output: str

    @property
    def prompt(self) -> str:
        """What stands before the answer, in the words of Stanford Alpaca."""
        if self.input:
            return (
                f"{_TASK}, paired with an input that provides further context. {_REQUEST}\n\n"
                f"### Instruction:\n{self.instruction}\n\n### Input:\n{self.input}\n\n### Response:\n"
            )
        return f"{_TASK}. {_REQUEST}\n\n### Instruction:\n{self.instruction}\n\n### Response:\n"


def instructions_of(
    source: str | os.PathLike[str], rows: Iterable[Row], *, seed: int | None = 0
) -> tuple[list[Instruction], int]:
    """Instructions from rows with `instruction`, `output` and maybe `input`.

    Args:
        source: what messages call them by.
        rows: as `read_rows` gives them.
        seed: of the order; None: that of the rows.

    Returns:
        The instructions, and how many were dropped for want of an answer: the original file has some.

    Raises:
        InputError: the rows cannot be read, one is broken or asks nothing, or none has an answer.
    """
    path = Path(source)
    instructions: list[Instruction] = []
    num_dropped = 0
    for where, row in rows:
        asked = _string(path, where, "instruction", column(path, where, row, "instruction"))
        if not asked:
            raise InputError(f"{path}, {where}: 'instruction' is empty")
        answer = _string(path, where, "output", column(path, where, row, "output"))
        about = _string(path, where, "input", row.get("input") or "")
        if answer:
            instructions.append(Instruction(asked, about, answer))
        else:
            num_dropped += 1
    if not instructions:
        raise InputError(f"{path}: holds no instruction with an answer")
    if seed is not None:
        random.Random(seed).shuffle(instructions)
    return instructions, num_dropped


def _string(path: Path, where: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"{path}, {where}: {name!r} must be a text, got {shown(value)}")
    return value.strip()
