"""The suites by name. Each is a module of this package with a function `cases(device, size)`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line lists the suites, and must not wait for torch before its help is shown
    import torch

    from cdt_fast.bench.case import Case

SIZES = ("toy", "cpu", "gpu")


def _suite(name: str) -> Callable[[torch.device, str], Iterator[Case]]:
    return lambda device, size: importlib.import_module(f"cdt_fast.bench.suites.{name}").cases(device, size)


SUITES = {name: _suite(name) for name in ("attention", "ops", "step", "cross_entropy")}
