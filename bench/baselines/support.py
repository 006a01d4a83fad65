"""Why a baseline cannot run here, in one line."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from cdt_fast.bench.case import Step, Unavailable

_LONGEST_REASON = 200


def imported(name: str) -> ModuleType:
    """The module `name`.

    Raises:
        Unavailable: it is not installed, or its import fails.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if (error.name or "").partition(".")[0] == package:
            raise Unavailable(f"{package} is not installed") from error
        raise Unavailable(f"{name} cannot be imported: {one_line(error)}") from error
    except Exception as error:  # a package built for another torch fails in many implementations
        raise Unavailable(f"{name} cannot be imported: {one_line(error)}") from error


def require_gpu(what: str, device: torch.device) -> None:
    """Raises:
    Unavailable: `device` is no NVIDIA GPU.
    """
    if device.type != "cuda":
        raise Unavailable(f"{what} needs an NVIDIA GPU")


def tried(step: Step) -> Step:
    """`step` after one run, in which what is compiled on first use is compiled.

    Raises:
        Unavailable: the run fails; a shape or dtype that a peer does not take is no error of the bench.
    """
    try:
        step()
    except Unavailable:
        raise
    except Exception as error:
        raise Unavailable(one_line(error)) from error
    return step


def one_line(error: Exception) -> str:
    """The type of an error and the first line of what it says."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {first}"[:_LONGEST_REASON]
