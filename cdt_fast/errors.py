"""The errors a user is meant to read: what was given, what was expected, what to do."""

from __future__ import annotations

import importlib
from types import ModuleType


class InputError(ValueError):
    """Input, a setting or a file that cannot be used. The command line prints it as one line and exits with 2."""


class MissingExtra(ImportError):
    """A package of an optional extra is needed and not installed; the message names the extra."""


def printable(text: str) -> str:
    """`text` with control characters spelled out: names of files and answers of servers must not steer a terminal."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import `module`, or raise MissingExtra: which extra of cdt-fast brings it, and for what `purpose`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{purpose} needs the package '{module.split('.')[0]}', which is not installed: "
            f"pip install 'cdt-fast[{extra}]'"
        ) from error
