"""torch.compile in the modes that a user would try, and why a baseline cannot run here: each function that finds it out
raises `Unavailable` with the reason in one line."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch

from cdt_fast.bench.case import Step, Unavailable

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_LONGEST_REASON = 200
# Every shape of a suite compiles the same functions anew; beyond its limit torch would go on in eager without a word.
_MOST_SHAPES = 100_000


def imported(name: str) -> ModuleType:
    """The module `name`; a package built for another torch fails in many ways."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Unavailable(f"{name} cannot be imported: {one_line(error)}") from error


def require_gpu(what: str, device: torch.device) -> None:
    """Refuse another device than an NVIDIA GPU."""
    if device.type != "cuda":
        raise Unavailable(f"{what} needs an NVIDIA GPU")


def tried(step: Step) -> Step:
    """`step` after one run; a shape or dtype that a peer does not take is no error of the bench."""
    try:
        step()
    except Exception as error:
        raise Unavailable(one_line(error)) from error
    return step


def one_line(error: Exception) -> str:
    """The type of an error and the first line of what it says."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"[:_LONGEST_REASON]


def modes(device: torch.device, autotune: bool = True) -> tuple[str, ...]:
    """The modes of torch.compile worth timing on `device`; a CPU has no CUDA graphs."""
    if not autotune:
        return ("default",)
    without_graphs = ("default", "max-autotune-no-cudagraphs")
    return (*without_graphs, "max-autotune") if device.type == "cuda" else without_graphs


def name_of_mode(mode: str) -> str:
    """As it is printed."""
    return "torch.compile" if mode == "default" else f"torch.compile, {mode}"


def compiled(
    function: Callable[Arguments, Result], mode: str, device: torch.device, fullgraph: bool = True
) -> Callable[Arguments, Result]:
    """`function`, compiled for static shapes on its first call, by a C++ compiler (CPU) or Triton (GPU)."""
    if device.type == "cuda":
        imported("triton")
    elif not any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name):
        raise Unavailable("torch.compile needs a C++ compiler on a CPU, and finds neither $CXX nor g++ nor clang++")
    return torch.compile(function, mode=mode, dynamic=False, fullgraph=fullgraph)


def first_run(step: Step) -> Step:
    """A step of compiled functions after its first run, which compiles them, or fails where torch would not."""

    def marked() -> list[torch.Tensor]:
        # Without the mark, a CUDA graph would keep the outputs of the steps before alive.
        torch.compiler.cudagraph_mark_step_begin()
        return step()

    with torch._dynamo.config.patch(
        recompile_limit=_MOST_SHAPES, accumulated_recompile_limit=_MOST_SHAPES, fail_on_recompile_limit_hit=True
    ):
        return tried(marked)
