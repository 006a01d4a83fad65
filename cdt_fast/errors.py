"""The errors of `cdt_fast.checks`, under their earlier name."""

from cdt_fast.checks import InputError, MissingExtra, printable, require

__all__ = ["InputError", "MissingExtra", "printable", "require"]
