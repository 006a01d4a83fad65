"""The goals that the benches are held to, and what a results file says about each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from cdt_fast.bench.suites.cross_entropy import ALL_ALIVE

Case = Mapping[str, Any]


class Goal(NamedTuple):
    """One goal."""

    device: Literal["cpu", "cuda"]
    suite: str  # where its cases are
    cases: str  # which of them it is about, a regular expression that is looked for in their names
    work: str  # what is measured, in words
    figure: Callable[[Case], float | None]  # what is compared, of one case; None where it was not measured
    # sign, bound: what a figure has to be
    sign: Literal["≥", ">", "≤"]
    bound: float
    unit: Literal["×", "%", ""]  # "×" times as fast, "%" a share, or "" a ratio

    @property
    def wanted(self) -> str:
        """The goal in words."""
        return f"{self.sign} {100 * self.bound if self.unit == '%' else self.bound:g} {self.unit}".rstrip()

    def concerns(self, case: Case) -> bool:
        """Whether it is about a case."""
        return re.search(self.cases, case["case"]) is not None

    def reached(self, figure: float) -> bool:
        """Whether a figure reaches it."""
        return {"≥": figure >= self.bound, ">": figure > self.bound, "≤": figure <= self.bound}[self.sign]

    def worst(self, results: Sequence[Mapping[str, Any]]) -> float | None:
        """Of the cases of these files that it is about the figure farthest from it; None where none has one."""
        cases = [case for result in results if result["suite"] == self.suite for case in result["cases"]]
        known = [figure for case in cases if self.concerns(case) and (figure := self.figure(case)) is not None]
        return (max if self.sign == "≤" else min)(known, default=None)

    def cell(self, figure: float | None) -> str:
        """A figure in words, and whether it is met; empty where there is none."""
        if figure is None:
            return ""
        shown = {"×": f"{figure:.2f} ×", "%": f"{figure:.0%}", "": f"{figure:.3f}"}[self.unit]
        return f"{shown}, {'met' if self.reached(figure) else '**missed**'}"


def timed(case: Case, role: str) -> Mapping[str, Any]:
    """The first implementation of a role that was timed; empty where none was."""
    matching = (one for one in case["implementations"].values() if one["role"] == role and one["status"] == "timed")
    return next(matching, {})


def _own(figure: str) -> Callable[[Case], float | None]:
    return lambda case: timed(case, "ours").get(figure)


_over_eager, _over_best_peer, _share_of_floor = map(_own, ("over_eager", "over_best_peer", "share_of_floor"))


def _over_unconstrained(case: Case) -> float | None:
    """Time of ours over the baseline's."""
    speed_up = _over_eager(case)
    return None if speed_up is None else 1 / speed_up


def _memory_over(other: Callable[[Case], Mapping[str, Any]]) -> Callable[[Case], float | None]:
    def ratio(case: Case) -> float | None:
        own, others = timed(case, "ours").get("peak_bytes"), other(case).get("peak_bytes")
        return own / others if own is not None and others else None

    return ratio


_memory_over_eager = _memory_over(lambda case: timed(case, "eager"))
_memory_over_alive = _memory_over(lambda case: case["implementations"].get(ALL_ALIVE, {}))


def _over_compiled(case: Case) -> float | None:
    """Times as fast as the fastest `torch.compile`."""
    own = timed(case, "ours")
    compiled = [one for name, one in case["implementations"].items() if name.startswith("torch.compile")]
    times = [one["median_seconds"] for one in compiled if one["status"] == "timed"]
    return min(times) / own["median_seconds"] if own and times else None


_PEER, _FLOOR = "against its best peer, the worst shape", "share of the floor, the worst shape"
_PEAK = "peak memory over eager's, the worst shape"
_FP32, _BF16 = "^DUST tied, constrained, float32$", "^DUST tied, constrained, bfloat16$"
_STEP = "constrained step of a tied DUST"
_CONSTRAINT = "constrained over unconstrained step, tied or next readout, each objective and coupling, the slowest"
_HEADLINE = r"^(?!.*own readout).*constrained( \(.*\))? against unconstrained"
_REPLAY = "step of one window replayed from a CUDA graph, against the same launched kernel by kernel, the worst model"
_ATTENTION = f"symmetric attention {_PEER}"
_LOSS = "layerwise cross-entropy of a language model"
# All depths of a language model; neither what they add to the last one, nor a small classifier.
_LANGUAGE_MODEL = "^(?!.*(against the last depth|classifier))"
_ALIVE, _APART = "which holds the logits of all depths", "which takes a depth at a time"
_CLASSIFIER = "layerwise cross-entropy of a classifier against eager, the worst shape"

GOALS = (
    Goal("cpu", "step", _FP32, f"{_STEP}, float32, against eager", _over_eager, "≥", 2.1, "×"),
    Goal("cpu", "step", _FP32, f"{_STEP}, float32, share of the floor", _share_of_floor, "≥", 0.8, "%"),
    Goal("cpu", "step", _FP32, f"{_STEP}, float32, peak memory over eager's", _memory_over_eager, "≤", 0.6, ""),
    Goal("cpu", "step", _BF16, f"{_STEP}, bfloat16, against eager in float32", _over_eager, "≥", 5, "×"),
    Goal("cuda", "step", _BF16, f"{_STEP}, bfloat16, against eager", _over_eager, "≥", 4, "×"),
    Goal("cuda", "step", _BF16, f"{_STEP}, bfloat16, against the best torch.compile", _over_compiled, "≥", 2, "×"),
    Goal("cuda", "step", _BF16, f"{_STEP}, bfloat16, peak memory over eager's", _memory_over_eager, "≤", 0.333, ""),
    Goal("cuda", "step", _BF16, f"{_STEP}, bfloat16, share of the floor", _share_of_floor, "≥", 0.6, "%"),
    Goal("cpu", "step", _HEADLINE, _CONSTRAINT, _over_unconstrained, "≤", 1.05, ""),
    Goal("cuda", "step", _HEADLINE, _CONSTRAINT, _over_unconstrained, "≤", 1.05, ""),
    Goal("cuda", "step", "CUDA graph against launches, 1 window,", _REPLAY, _over_eager, ">", 1, "×"),
    Goal("cpu", "attention", "", _ATTENTION, _over_best_peer, "≥", 1, "×"),
    Goal("cuda", "attention", "", _ATTENTION, _over_best_peer, "≥", 1, "×"),
    Goal("cpu", "cross_entropy", _LANGUAGE_MODEL, f"{_LOSS} against eager, the worst shape", _over_eager, "≥", 1, "×"),
    Goal("cpu", "cross_entropy", "classifier", _CLASSIFIER, _over_eager, "≥", 1, "×"),
    Goal("cpu", "cross_entropy", _LANGUAGE_MODEL, f"{_LOSS} {_PEER}", _over_best_peer, ">", 1, "×"),
    Goal("cuda", "cross_entropy", _LANGUAGE_MODEL, f"{_LOSS} {_PEER}", _over_best_peer, ">", 1, "×"),
    Goal("cuda", "cross_entropy", _LANGUAGE_MODEL, f"{_LOSS}, {_FLOOR}", _share_of_floor, "≥", 0.75, "%"),
    Goal("cuda", "cross_entropy", _LANGUAGE_MODEL, f"{_LOSS}, {_PEAK}, {_ALIVE}", _memory_over_alive, "≤", 0.05, ""),
    Goal("cuda", "cross_entropy", _LANGUAGE_MODEL, f"{_LOSS}, {_PEAK}, {_APART}", _memory_over_eager, "≤", 1, ""),
)
