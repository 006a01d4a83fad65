"""Instructions with their answers, in Alpaca's form."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from cdt_fast.errors import InputError
from cdt_fast.sequence.data.rows import Row, text_of

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


def instructions_of(source: str | os.PathLike[str], rows: Iterable[Row]) -> tuple[list[Instruction], int]:
    """Instructions from rows with `instruction`, `output` and maybe `input`.

    Args:
        source: what messages call them by.
        rows: as `read_rows` gives them.

    Returns:
        The instructions, and how many were dropped for want of an answer: the original file has some.

    Raises:
        InputError: the rows cannot be read, one is broken or asks nothing, or none has an answer.
    """
    instructions: list[Instruction] = []
    num_dropped = 0
    for place, row in rows:
        values = place, {**row, "input": row.get("input") or ""}
        entry = Instruction(*(text_of(values, column) for column in ("instruction", "input", "output")))
        if not entry.instruction:
            raise InputError(f"{place}: 'instruction' is empty")
        if entry.output:
            instructions.append(entry)
        else:
            num_dropped += 1
    if not instructions:
        raise InputError(f"{source}: holds no instruction with an answer")
    return instructions, num_dropped
