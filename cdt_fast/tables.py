"""Tables of words, for a terminal and in Markdown."""

from collections.abc import Sequence


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal: the first column to the left, the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in (first, *others)))
    return "\n".join(lines)


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---" + "|---:" * (len(rows[0]) - 1) + "|")
    return "\n".join(lines)
