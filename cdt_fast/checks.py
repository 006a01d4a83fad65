"""Errors that a user is meant to read, and checks of single values: what was given, what is expected, what to do."""

import difflib
import importlib.util
import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from types import ModuleType
from typing import Any


class InputError(ValueError):
    """Input, a setting or a file that cannot be used. The command line prints it as one line and exits with 2."""


class MissingExtra(ImportError):
    """A package of an optional extra is needed and not installed; the message names the extra."""


def printable(text: str) -> str:
    """Return `text` with control characters spelled out: names of files and answers must not steer a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import `module`, or raise MissingExtra: which extra of cdt-fast brings it, and for what `purpose`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        found = importlib.util.find_spec(package) is not None
        state = f"cannot be imported ({error})" if found else "is not installed"
        message = f"{purpose} needs the package '{package}', which {state}: pip install 'cdt-fast[{extra}]'"
        raise MissingExtra(message) from error


def check_number(
    name: str, value: Any, expected: str = "a finite number", holds: Callable[[float], bool] = lambda value: True
) -> float:
    """Return `value` as a float, or raise InputError: it is no finite real number, or `holds` is false."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InputError(f"{name} must be {expected}, got {value!r} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:  # an integer, of more digits than Python may write
        raise InputError(f"{name} must be {expected}, got an integer beyond the largest float") from None
    # Comparisons, for a function of the math module would break a graph that torch.compile makes for any number.
    if not (-math.inf < number < math.inf and holds(number)):
        raise InputError(f"{name} must be {expected}, got {value!r}")
    return number


def check_positive(name: str, value: Any) -> float:
    """Return `value` as a float, or raise InputError: it is not a finite number above zero."""
    return check_number(name, value, "a finite number > 0", lambda number: number > 0)


def check_non_negative(name: str, value: Any) -> float:
    """Return `value` as a float, or raise InputError: it is not a finite number, zero or above."""
    return check_number(name, value, "a finite number >= 0", lambda number: number >= 0)


def check_fraction(name: str, value: Any) -> float:
    """Return `value` as a float, or raise InputError: it is not a number in [0, 1)."""
    return check_number(name, value, "a number in [0, 1)", lambda number: 0 <= number < 1)


def check_integer(name: str, value: Any, least: int, most: float = math.inf) -> int:
    """Return `value` as an int, or raise InputError: it is not a whole number of at least `least`, at most `most`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
        expected = f">= {least}" if most == math.inf else f"from {least} to {most}"
        raise InputError(f"{name} must be an integer {expected}, got {value!r}")
    return int(value)


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Return `value`, or raise InputError: it is not one of `choices`."""
    if value not in choices:
        raise InputError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about the unknown `name`: the one of `known` close to it, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"
