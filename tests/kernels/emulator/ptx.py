"""The text of a PTX kernel as blocks of instructions, and where the ways of threads that have parted meet again."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

COMMENT = re.compile(r"//[^\n]*")
ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)", re.DOTALL)
PARAMETER = re.compile(r"\.param \.\w+.*?(\w+)\s*$", re.DOTALL)
THREADS = re.compile(r"\.(?:reqntid|maxntid) (\d+)")
LABEL = re.compile(r"(\$L\w+):")
INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)

Successors: TypeAlias = "tuple[int, ...]"


class Fault(Exception):
    """What would be a wrong number, a crash or a race on a GPU, or what the emulator does not know."""


@dataclass(frozen=True)
class Instruction:
    """`@guard opcode operands`; the guard is a predicate register, "" for none.

    A braced list of registers is one operand: `{%r1, %r2}`.
    """

    text: str
    guard: str
    negated: bool
    opcode: str
    operands: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Instruction:
        found = INSTRUCTION.fullmatch(text)
        if found is None:
            raise Fault(f"not an instruction: {text!r}")
        negation, guard, opcode, rest = found.groups()
        return cls(text, guard or "", bool(negation), opcode, tuple(_operands(rest)))

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    @property
    def ends_a_block(self) -> bool:
        return self.parts[0] in ("bra", "ret")


def unknown(instruction: Instruction) -> Fault:
    """Of an instruction, or a form of it, that nothing here executes."""
    return Fault(f"the emulator does not know {instruction.text!r}")


def _operands(text: str) -> list[str]:
    """Split at the commas that are not inside of braces or brackets."""
    found, depth, start = [], 0, 0
    for place, character in enumerate(text):
        if character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
        elif character == "," and depth == 0:
            found.append(text[start:place].strip())
            start = place + 1
    return [*found, text[start:].strip()] if text.strip() else []


@dataclass
class Block:
    """Instructions that are executed one after the other, and what follows.

    Attributes:
        body: without the branch at the end.
        branch: the guarded branch that decides between `following`, or None where there is one successor.
        following: the blocks that may come next: the branch's target first. The one behind the last is the end.
        meeting: where threads that part here are all together again.
    """

    body: list[Instruction] = field(default_factory=list)
    branch: Instruction | None = None
    following: Successors = ()
    meeting: int = -1


@dataclass
class Program:
    """A kernel.

    Attributes:
        name: of the kernel.
        parameters: their names, in order.
        threads: of a block of the launch.
        blocks: of instructions; the first is the entry.
    """

    name: str
    parameters: list[str]
    threads: int
    blocks: list[Block]

    @classmethod
    def parse(cls, text: str) -> Program:
        text = COMMENT.sub("", text)
        entry, threads = ENTRY.search(text), THREADS.search(text)
        if entry is None or threads is None:
            raise Fault("no kernel of a known number of threads in this PTX")
        parameters = [found.group(1) for part in entry.group(2).split(",") if (found := PARAMETER.search(part))]
        start = text.index("{", entry.end())
        # What follows the closing brace describes the source, for debuggers.
        blocks = _blocks(text[start + 1 : text.index("\n}", start)])
        _find_meetings(blocks)
        return cls(entry.group(1), parameters, int(threads.group(1)), blocks)


def _blocks(body: str) -> list[Block]:
    blocks, labels, targets = [Block()], {}, {}
    for line in filter(None, map(str.strip, body.splitlines())):
        label = LABEL.match(line)
        if label is not None:
            if blocks[-1].body:
                blocks.append(Block())
            labels[label.group(1)] = len(blocks) - 1
            continue
        if line.startswith("."):
            continue
        # Scopes of inline assembly hold one instruction each, and no registers that are declared twice.
        for text in filter(None, (part.strip() for part in line.split(";"))):
            if text in ("{", "}"):
                continue
            instruction = Instruction.of(text)
            if not instruction.ends_a_block:
                blocks[-1].body.append(instruction)
                continue
            targets[len(blocks) - 1] = instruction
            blocks.append(Block())
    end = len(blocks)
    for place, block in enumerate(blocks):
        last = targets.get(place)
        if last is None:
            block.following = (place + 1,)
        elif last.opcode == "ret":
            block.following = (end,)
        else:
            target = labels[last.operands[0]]
            block.branch = last if last.guard else None
            block.following = (target, place + 1) if last.guard else (target,)
    return blocks


def _find_meetings(blocks: list[Block]) -> None:
    """The nearest block that every way from here to the end goes through (the immediate post-dominator)."""
    end = len(blocks)
    through = [set(range(end + 1)) for _ in blocks] + [{end}]
    changed = True
    while changed:
        changed = False
        for place in reversed(range(end)):
            common = set.intersection(*(through[following] for following in blocks[place].following))
            if common | {place} != through[place]:
                through[place] = common | {place}
                changed = True
    for place, block in enumerate(blocks):
        later = through[place] - {place}
        block.meeting = next(one for one in later if through[one] >= later)
