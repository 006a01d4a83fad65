"""How time and memory grow with each size: eager torch and `cdt_fast` at several values of one, all others fixed.

The run fits an exponent over each series: time ~ size^exponent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from cdt_fast.bench.case import Case
from cdt_fast.bench.suites import cross_entropy, ops
from cdt_fast.bench.suites.inputs import name_of
from cdt_fast.bench.suites.step import against_eager
from cdt_fast.bench.suites.trained import VideoWork
from cdt_fast.bench.suites.training_step import CONSTRAINED

# What each series varies, and the values; the first entry of each size is the shape that the others start from.
_LAYER: dict[str, tuple[dict[str, int], dict[str, list[int]]]] = {
    "toy": ({"B": 2, "T": 4, "n": 16, "m": 32}, {"T": [4, 8, 16], "B": [1, 2, 4], "m": [32, 64, 128]}),
    "cpu": (
        {"B": 50, "T": 20, "n": 256, "m": 1024},
        {"T": [10, 20, 40, 80, 160], "B": [25, 50, 100, 200], "m": [512, 1024, 2048, 4096]},
    ),
    "gpu": (
        {"B": 800, "T": 20, "n": 256, "m": 1024},
        {"T": [20, 80, 320, 1280], "B": [200, 800, 3200, 12800], "m": [512, 1024, 2048, 4096]},
    ),
}
_DEPTHS: dict[str, tuple[int, list[int]]] = {
    "toy": (2, [1, 2, 4]),
    "cpu": (100, [2, 4, 8, 16]),
    "gpu": (1600, [2, 4, 8, 16]),
}
_CROSS_ENTROPY: dict[str, tuple[dict[str, int], dict[str, list[int]]]] = {
    "toy": ({"depths": 2, "N": 8, "d": 16, "V": 40}, {"V": [20, 40, 80], "depths": [1, 2, 4]}),
    "cpu": (
        {"depths": 4, "N": 256, "d": 256, "V": 8192},
        {"V": [2048, 4096, 8192, 16384, 32768], "depths": [2, 4, 8, 16]},
    ),
    "gpu": (
        {"depths": 4, "N": 4096, "d": 1024, "V": 32768},
        {"V": [8192, 16384, 32768, 65536, 131072], "depths": [2, 4, 8, 16]},
    ),
}


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """Forward and backward of the unrolled layer and the layerwise cross-entropy, and the constrained DUST step."""
    dtype = torch.bfloat16 if size == "gpu" else torch.float32
    for work, sizes, build in (
        ("unrolled layer", _LAYER, _layer),
        ("layerwise cross-entropy", _CROSS_ENTROPY, _cross_entropy),
    ):
        base, series = sizes[size]
        for varied, values in series.items():
            for value in values:
                yield _in_series(build({**base, varied: value}, dtype, device, size), work, varied)
    sequences, values = _DEPTHS[size]
    small: dict[str, Any] = {"window": 5, "patch": 16, "code": 64} if size == "toy" else {}
    for value in values:
        case = against_eager(VideoWork("DUST", sequences, layers=value, **small), device, name_of(dtype), CONSTRAINED)
        yield replace(_in_series(case, "DUST step", "L"), note="tied, constrained")


def _layer(shape: dict[str, int], dtype: torch.dtype, device: torch.device, size: str) -> Case:
    work = ops.unrolled_layer(ops.Shape(shape["B"], shape["T"], shape["n"], shape["m"], depths=1))
    return ops.case_of(work, dtype, device, size)


def _cross_entropy(shape: dict[str, int], dtype: torch.dtype, device: torch.device, size: str) -> Case:
    whole = cross_entropy.Shape("", shape["depths"], shape["N"], shape["d"], shape["V"])
    return cross_entropy.case_of(whole, cross_entropy.KNOWN, dtype, device, size)


def _in_series(case: Case, work: str, varied: str) -> Case:
    """The case as one of a series, by eager torch and by `cdt_fast` alone."""
    title = f"{work} over {varied}, {case.dtype}"
    eager = replace(next(candidate for candidate in case.implementations if candidate.role == "eager"), name="eager")
    ours = next(candidate for candidate in case.implementations if candidate.role == "ours")
    return replace(
        case,
        suite="scaling",
        name=f"{title}, {varied} {case.shape[varied]}",
        implementations=(eager, ours),
        varied=varied,
        series=title,
    )
