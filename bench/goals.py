"""The goals that the benches are held to, and what a results file says about each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Case = Mapping[str, Any]
OURS = "ours"


@dataclass(frozen=True)
class Goal:
    """One goal.

    Attributes:
        work: what is measured, in words.
        device: "cpu" or "cuda".
        wanted: the goal in words.
        suite: where its cases are.
        concerns: which of them it is about.
        figure: what is compared, of one case; None where it was not measured.
        reached: whether a figure reaches it.
        shown: the format of the figure.
        worst: picks the figure to show where several cases are concerned: the one farthest from the goal.
    """

    work: str
    device: str
    wanted: str
    suite: str
    concerns: Callable[[Case], bool]
    figure: Callable[[Case], float | None]
    reached: Callable[[float], bool]
    shown: str
    worst: Callable[[list[float]], float] = min


def ours(case: Case) -> Mapping[str, Any] | None:
    """The first way of the package itself that was timed."""
    timed = [way for way in case["ways"].values() if way["role"] == OURS and way["status"] == "timed"]
    return timed[0] if timed else None


def _of_ours(name: str) -> Callable[[Case], float | None]:
    def figure(case: Case) -> float | None:
        way = ours(case)
        return None if way is None else way.get(name)

    return figure


def _eager_memory(case: Case) -> float | None:
    """Peak memory of ours over eager's."""
    eager = next((way for way in case["ways"].values() if way["role"] == "eager"), {})
    way = ours(case)
    if way is None or way.get("peak_bytes") is None or not eager.get("peak_bytes"):
        return None
    return way["peak_bytes"] / eager["peak_bytes"]


def _best_compiled(case: Case) -> float | None:
    """Times as fast as the fastest `torch.compile`."""
    way = ours(case)
    times = [
        other["median_seconds"]
        for name, other in case["ways"].items()
        if name.startswith("torch.compile") and other["status"] == "timed"
    ]
    return min(times) / way["median_seconds"] if way is not None and times else None


def _slowdown(case: Case) -> float | None:
    speed_up = _of_ours("over_eager")(case)
    return None if speed_up is None else 1 / speed_up


def _reference(dtype: str) -> Callable[[Case], bool]:
    return lambda case: case["case"] == f"DUST tied, constrained, {dtype}"


def _headline(case: Case) -> bool:
    return "constrained against unconstrained" in case["case"] and "own readout" not in case["case"]


def _language_model(case: Case) -> bool:
    """All depths of a language model in every way; neither what they add to the last one, nor a small classifier."""
    return "against the last depth" not in case["case"] and "classifier" not in case["case"]


def _classifier(case: Case) -> bool:
    return "classifier" in case["case"]


def _smallest_replayed(case: Case) -> bool:
    return "CUDA graph against launches, 1 window," in case["case"]


def _any(case: Case) -> bool:
    return True


def _at_least(bound: float) -> Callable[[float], bool]:
    return lambda value: value >= bound


def _above(bound: float) -> Callable[[float], bool]:
    return lambda value: value > bound


def _at_most(bound: float) -> Callable[[float], bool]:
    return lambda value: value <= bound


_STEP = "constrained step of a tied DUST"
_CROSS_ENTROPY = "layerwise cross-entropy of a language model"
_SPEED = "{:.2f} ×"
_SHARE = "{:.0%}"

GOALS = (
    Goal(
        f"{_STEP}, float32, against eager",
        "cpu",
        "≥ 2.1 ×",
        "step",
        _reference("float32"),
        _of_ours("over_eager"),
        _at_least(2.1),
        _SPEED,
    ),
    Goal(
        f"{_STEP}, float32, share of the floor",
        "cpu",
        "≥ 80 %",
        "step",
        _reference("float32"),
        _of_ours("share_of_floor"),
        _at_least(0.8),
        _SHARE,
    ),
    Goal(
        f"{_STEP}, float32, peak memory over eager's",
        "cpu",
        "≤ 0.6",
        "step",
        _reference("float32"),
        _eager_memory,
        _at_most(0.6),
        "{:.2f}",
        max,
    ),
    Goal(
        f"{_STEP}, bfloat16, against eager in float32",
        "cpu",
        "≥ 5 ×",
        "step",
        _reference("bfloat16"),
        _of_ours("over_eager"),
        _at_least(5),
        _SPEED,
    ),
    Goal(
        f"{_STEP}, bfloat16, against eager",
        "cuda",
        "≥ 4 ×",
        "step",
        _reference("bfloat16"),
        _of_ours("over_eager"),
        _at_least(4),
        _SPEED,
    ),
    Goal(
        f"{_STEP}, bfloat16, against the best torch.compile",
        "cuda",
        "≥ 2 ×",
        "step",
        _reference("bfloat16"),
        _best_compiled,
        _at_least(2),
        _SPEED,
    ),
    Goal(
        f"{_STEP}, bfloat16, peak memory over eager's",
        "cuda",
        "≤ 0.33",
        "step",
        _reference("bfloat16"),
        _eager_memory,
        _at_most(1 / 3),
        "{:.2f}",
        max,
    ),
    Goal(
        f"{_STEP}, bfloat16, share of the floor",
        "cuda",
        "≥ 60 %",
        "step",
        _reference("bfloat16"),
        _of_ours("share_of_floor"),
        _at_least(0.6),
        _SHARE,
    ),
    *(
        Goal(
            "constrained over unconstrained step, tied or next readout, the slowest",
            device,
            "≤ 1.05",
            "step",
            _headline,
            _slowdown,
            _at_most(1.05),
            "{:.3f}",
            max,
        )
        for device in ("cpu", "cuda")
    ),
    Goal(
        "step of one window replayed from a CUDA graph, against the same launched kernel by kernel, the worst model",
        "cuda",
        "> 1 ×",
        "step",
        _smallest_replayed,
        _of_ours("over_eager"),
        _above(1),
        _SPEED,
    ),
    *(
        Goal(
            "symmetric attention against its best peer, the worst shape",
            device,
            "≥ 1 ×",
            "attention",
            _any,
            _of_ours("over_best_peer"),
            _at_least(1),
            _SPEED,
        )
        for device in ("cpu", "cuda")
    ),
    Goal(
        f"{_CROSS_ENTROPY} against eager, the worst shape",
        "cpu",
        "≥ 1 ×",
        "cross_entropy",
        _language_model,
        _of_ours("over_eager"),
        _at_least(1),
        _SPEED,
    ),
    Goal(
        "layerwise cross-entropy of a classifier against eager, the worst shape",
        "cpu",
        "≥ 1 ×",
        "cross_entropy",
        _classifier,
        _of_ours("over_eager"),
        _at_least(1),
        _SPEED,
    ),
    *(
        Goal(
            f"{_CROSS_ENTROPY} against its best peer, the worst shape",
            device,
            "> 1 ×",
            "cross_entropy",
            _language_model,
            _of_ours("over_best_peer"),
            _above(1),
            _SPEED,
        )
        for device in ("cpu", "cuda")
    ),
    Goal(
        f"{_CROSS_ENTROPY}, share of the floor, the worst shape",
        "cuda",
        "≥ 75 %",
        "cross_entropy",
        _language_model,
        _of_ours("share_of_floor"),
        _at_least(0.75),
        _SHARE,
    ),
    Goal(
        f"{_CROSS_ENTROPY}, peak memory over eager's, the worst shape",
        "cuda",
        "≤ 0.05",
        "cross_entropy",
        _language_model,
        _eager_memory,
        _at_most(0.05),
        "{:.3f}",
        max,
    ),
)
