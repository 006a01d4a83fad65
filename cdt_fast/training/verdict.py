"""Whether a run is of any use: its constraints, its depths against what costs nothing and against plain training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from cdt_fast.training.task import EvaluatedRun


class Verdict(NamedTuple):
    """Attributes:
    success: the constraints hold, where the run has some, and the last depth is better than the input, every
        baseline without weights and, where one stands beside it, the plain run.
    text: that and where the exits stand, in words.
    """

    success: bool
    text: str


def verdict(run: EvaluatedRun, others: Sequence[EvaluatedRun] = ()) -> Verdict:
    """The verdict on a run; `others` are runs on the same data, among which a plain one is looked for."""
    reading = run.task.reading(run)
    layers = len(reading.depths) - 1
    # What each depth has to beat: the same for all, but for the plain run's own value at that depth.
    references = {name: [value] * (layers + 1) for name, value in reading.references.items()}
    plain = plain_run(run, others)
    if plain is not None:
        references[f"plain training ({plain.name or plain.folder.name})"] = plain.task.reading(plain).depths
    last = reading.depths[-1]
    better = {name: last < values[-1] for name, values in references.items()}
    holds = run.evaluation.feasible or not run.evaluation.constrained
    success = holds and all(better.values())
    words = ["all constraints hold" if holds else "constraints are violated"] if run.evaluation.constrained else []
    for won, word in ((True, "better"), (False, "not better")):
        names = [f"{name} ({references[name][-1]:.4g})" for name in references if better[name] == won]
        if names:
            subject = (
                "" if won is False and any(better.values()) else f"the last depth ({reading.measure}: {last:.4g}) is "
            )
            words.append(f"{subject}{word} than {_listed(names)}")
    text = f"{'Success' if success else 'No success'}: {'; '.join(words)}."
    if layers > 1:
        exits = [
            f"than {name}: {_ranges([depth for depth in range(1, layers) if reading.depths[depth] < values[depth]])}"
            for name, values in references.items()
        ]
        text += f" Exits better {'; '.join(exits)}."
    of = run.evaluation
    if of.constrained and of.kept_step is not None and of.kept_step <= of.warmup_steps < of.trained_steps:
        text += (
            f" The model that was kept is that of step {of.kept_step}, before the constraints came on (after step "
            f"{of.warmup_steps}): by its last loss and the price of its violations none after it was better."
        )
    return Verdict(success, text)


def plain_run(run: EvaluatedRun, others: Sequence[EvaluatedRun]) -> EvaluatedRun | None:
    """Among runs of as many layers the unconstrained one on the last loss alone: of as many parameters and the same
    seed, where there is one. None for a run that is one itself.
    """
    if _is_plain(run):
        return None
    plain = [other for other in others if _is_plain(other) and other.evaluation.layers == run.evaluation.layers]
    return min(
        plain,
        key=lambda other: (
            other.evaluation.parameters != run.evaluation.parameters,
            other.settings.training.seed != run.settings.training.seed,
        ),
        default=None,
    )


def _is_plain(run: EvaluatedRun) -> bool:
    return not run.settings.constrained and run.settings.objective == "last"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]


def _ranges(depths: Sequence[int]) -> str:
    """`1 to 3 and 5`, or `none`."""
    if not depths:
        return "none"
    starts = [depths[0], *(second for first, second in pairwise(depths) if second > first + 1)]
    ends = [*(first for first, second in pairwise(depths) if second > first + 1), depths[-1]]
    return _listed([str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)])
