"""How time and memory grow with each size: eager torch and `cdt_fast` at several values of one, all others fixed.

The run fits an exponent over each series: time ~ size^exponent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.bench.case import Case, Step, Way
from cdt_fast.bench.suites.step import CONSTRAINED, TOLERANCES, Work, against_eager
from cdt_fast.ops.cross_entropy import layerwise_cross_entropy_reference
from cdt_fast.ops.unrolled import unrolled_layer_reference

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


@dataclass(frozen=True)
class _Series:
    """One work over one size."""

    work: str
    varied: str
    dtype: str

    @property
    def title(self) -> str:
        return f"{self.work} over {self.varied}, {self.dtype}"


def cases(device: torch.device, size: str) -> Iterator[Case]:
    """Forward and backward of the unrolled layer, the constrained DUST step and the layerwise cross-entropy."""
    dtype = "bfloat16" if size == "gpu" else "float32"
    for work, sizes, build in (
        ("unrolled layer", _LAYER, _layer_case),
        ("layerwise cross-entropy", _CROSS_ENTROPY, _cross_entropy_case),
    ):
        base, series = sizes[size]
        for varied, values in series.items():
            for value in values:
                yield build(_Series(work, varied, dtype), {**base, varied: value}, device)
    sequences, values = _DEPTHS[size]
    small: dict[str, Any] = {"window": 5, "patch": 16, "code": 64} if size == "toy" else {}
    series_of_depths = _Series("DUST step", "L", dtype)
    for value in values:
        case = against_eager(Work("DUST", sequences, layers=value, **small), device, dtype, CONSTRAINED)
        ways = tuple(way for way in case.ways if way.role != "peer")
        yield _in_series(replace(case, ways=ways, note="tied, constrained"), series_of_depths)


def _in_series(case: Case, series: _Series) -> Case:
    value = case.shape[series.varied]
    return replace(
        case,
        suite="scaling",
        name=f"{series.title}, {series.varied} {value}",
        varied=series.varied,
        series=series.title,
    )


def _layer_case(series: _Series, shape: dict[str, int], device: torch.device) -> Case:
    generator = torch.Generator().manual_seed(0)
    B, T, n, m = shape.values()

    def drawn(*sizes: int, scale: float) -> Tensor:
        return (scale * torch.randn(sizes, generator=generator)).to(device)

    # Scores of about one: a softmax that neither copies nor averages.
    arguments = {
        "codes": drawn(B, T, m, scale=m**-0.5),
        "signal": drawn(B, T, n, scale=n**-0.25),
        "dictionary": drawn(n, m, scale=n**-0.25),
    }
    upstream = (drawn(B, T, m, scale=1.0), drawn(B, T, n, scale=1.0))

    def step(layer: Callable[..., tuple[Tensor, ...]], dtype: torch.dtype) -> Step:
        inputs = {name: tensor.to(dtype).requires_grad_() for name, tensor in arguments.items()}
        weights = [tensor.to(dtype) for tensor in upstream]

        def one() -> list[Tensor]:
            found = layer(**inputs, step=0.2, threshold=0.05)
            gradients = torch.autograd.grad(found, list(inputs.values()), weights)
            return [*(tensor.detach() for tensor in found), *gradients]

        return one

    run = getattr(torch, series.dtype)
    return _case(
        series,
        shape,
        eager=lambda: step(unrolled_layer_reference, run),
        ours=lambda: step(ops.unrolled_layer, run),
        expected=lambda: step(unrolled_layer_reference, _exact(device))(),
        # Two products of the tokens with the dictionary forward and four backward, and those of the attention; the
        # projection of the codes that come in is one more, with its two gradients.
        flop=2.0 * B * T * (9 * n * m + 5 * T * n + 3 * T * m),
        moved=float(run.itemsize * (B * T * (5 * m + 5 * n) + 2 * n * m)),
    )


def _cross_entropy_case(series: _Series, shape: dict[str, int], device: torch.device) -> Case:
    generator = torch.Generator().manual_seed(0)
    depths, N, d, V = shape.values()
    hidden = [torch.randn(N, d, generator=generator).to(device) for _ in range(depths)]
    head = (d**-0.5 * torch.randn(V, d, generator=generator)).to(device)
    targets = torch.randint(V, (N,), generator=generator).to(device)
    weights = torch.linspace(0.5, 1.5, depths)

    def step(run: Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]], dtype: torch.dtype) -> Step:
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (*hidden, head)]

        def one() -> list[Tensor]:
            total, per_layer = run(inputs[:-1], inputs[-1])
            return [per_layer.detach(), *torch.autograd.grad(total, inputs)]

        return one

    def eager(states: list[Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
        per_layer = layerwise_cross_entropy_reference(states, weight, targets)
        return (weights.to(per_layer) * per_layer).sum(), per_layer

    def fused(states: list[Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
        return ops.layerwise_cross_entropy(states, weight, targets, layer_weights=weights.to(device))

    run = getattr(torch, series.dtype)
    return _case(
        series,
        shape,
        eager=lambda: step(eager, run),
        ours=lambda: step(fused, run),
        expected=lambda: step(eager, _exact(device))(),
        flop=6.0 * depths * N * d * V,
        moved=float(run.itemsize * (2 * depths * N * d + 2 * V * d)),
    )


def _exact(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type == "cpu" else torch.float32


def _case(
    series: _Series,
    shape: dict[str, int],
    eager: Callable[[], Step],
    ours: Callable[[], Step],
    expected: Step,
    flop: float,
    moved: float,
) -> Case:
    case = Case(
        suite="scaling",
        name="",
        shape=shape,
        dtype=series.dtype,
        ways=(Way("eager", "eager", eager), Way("cdt_fast", "ours", ours)),
        expected=expected,
        tolerance=TOLERANCES[series.dtype],
        flop=flop,
        moved=moved,
    )
    return _in_series(case, series)
