"""A classifier that leaves before its last layer where it is sure: the threshold, calibrated, and who leaves when.

a row leaves at the first depth d that is read with  max_c p_d(c) ≥ τ,  else at the last;  for τ = 1 none does
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cdt_fast.checks import check_number
from cdt_fast.errors import InputError

_NORMAL_QUANTILE = 1.959963984540054  # of 97.5 %


@dataclass(frozen=True)
class Calibration:
    """A threshold of confidence, and what it did on the answers (rows of a classifier, tokens) it was chosen on.

    Attributes:
        threshold: the least probability at which the answer of an exit is taken; 1 where no other keeps the agreement.
        agreement: the share of the answers that were then those of the last depth.
        least_agreement: the lower end of its 95 % interval (Wilson), which the threshold was chosen by.
        exit_share: the share of the answers that were taken before the last depth.
    """

    threshold: float
    agreement: float
    least_agreement: float
    exit_share: float


class EarlyAnswers(NamedTuple):
    """What rows were answered with, and where they left.

    Attributes:
        logits: `[rows, classes]`, of the depth at which each row left.
        depths: `[rows]` int64, that depth.
    """

    logits: Tensor
    depths: Tensor


def calibrate_confidence(depth_logits: Iterable[Sequence[Tensor]], agreement: float = 0.95) -> Calibration:
    """The threshold at which a classifier with early exits answers so many rows as its last depth does.

    It is the least one whose agreement on these rows is as large with 95 % confidence.

        calibrate_confidence([model.depth_logits(ids, lengths=lengths)], agreement=0.95)

    Args:
        depth_logits: of every batch of held-out rows the logits of the depths that are read, `[rows, classes]` each,
            the last depth's last. Use rows that the model was not trained on.
        agreement: the share of the rows, in (0, 1).

    Raises:
        InputError: no row, fewer than two depths, logits that are not finite or of unequal shapes, or an agreement out
            of its range.
    """
    batches = [confidence_of(logits) for logits in depth_logits]
    if not sum(len(confidence) for confidence, _ in batches):
        raise InputError("depth_logits must hold at least one row to calibrate the confidence on, got none")
    confidence, answers = (torch.cat(parts).cpu() for parts in zip(*batches, strict=True))
    return least_threshold(confidence[:, :-1], answers[:, :-1] == answers[:, -1:], agreement)


@torch.no_grad()
def confidence_of(logits: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The largest probability of each depth, `[rows, depths]` in float64, and the class that has it, int64.

    Raises:
        InputError: see `calibrate_confidence`.
    """
    shapes = {tuple(depth.shape) for depth in logits}
    if len(logits) < 2 or len(shapes) != 1 or logits[0].dim() != 2:
        raise InputError(
            "depth_logits must be a tensor [rows, classes] for each of at least two depths, got shapes "
            f"{[tuple(depth.shape) for depth in logits]}"
        )
    stacked = torch.stack([_wide(depth) for depth in logits], 1)
    if not stacked.isfinite().all():
        raise InputError("depth_logits must be finite, got NaN or infinity")
    confidence, answers = stacked.softmax(-1).max(-1)
    return confidence.double(), answers


def least_threshold(confidence: Tensor, agrees: Tensor, agreement: float) -> Calibration:
    """See `calibrate_confidence`; of exits for every answer, the last depth aside.

    Args:
        confidence: `[answers, exits]` float64, in the order in which the exits come.
        agrees: `[answers, exits]` bool, whether the exit's answer is that of the last depth.
        agreement: the share of the answers, in (0, 1).

    Raises:
        InputError: it is out of its range.
    """
    wanted = check_number("agreement", agreement, "a number in (0, 1)", lambda number: 0 < number < 1)
    answers = len(confidence)
    # As the threshold falls, the exits of a row become sure one after the other, and it leaves at the first of them.
    falling, order = confidence.sort(dim=1, descending=True, stable=True)
    wrong = ~agrees.gather(1, order.cummin(1).values)
    more_wrong = wrong.int().diff(dim=1, prepend=torch.zeros(answers, 1, dtype=torch.int32)).flatten()
    leaves = torch.zeros_like(wrong, dtype=torch.int32)
    leaves[:, 0] = 1
    thresholds, events = falling.flatten().sort(descending=True, stable=True)
    errors, left = more_wrong[events].cumsum(0), leaves.flatten()[events].cumsum(0)
    best = Calibration(1.0, 1.0, wilson_interval(answers, answers)[0], 0.0)
    for last in thresholds.diff(append=thresholds.new_tensor([-1.0])).nonzero().flatten().tolist():  # none among equals
        right = answers - int(errors[last])
        least = wilson_interval(right, answers)[0]
        if least >= wanted and thresholds[last] < 1:
            best = Calibration(float(thresholds[last]), right / answers, least, int(left[last]) / answers)
    return best


def leave_early(depths: Sequence[int], threshold: float, read: Callable[[int, Tensor | None], Tensor]) -> EarlyAnswers:
    """Read one depth after the other, each of the rows that are left. This waits for the device, once a depth.

    Args:
        depths: increasing; at the last all rows leave.
        threshold: τ, in [0, 1].
        read: `(depth, kept)` to the logits `[rows, classes]` at a depth of the rows `kept`, `[rows before]` bool among
            those of the call before; None: all of them.

    Raises:
        InputError: the threshold is out of its range.
    """
    threshold = check_number("threshold", threshold, "a number in [0, 1]", lambda number: 0 <= number <= 1)
    answered, left_at, left, kept = None, None, None, None
    for depth in depths:
        logits = read(depth, kept)
        if answered is None or left_at is None or left is None:
            answered, left = torch.empty_like(logits), torch.arange(len(logits), device=logits.device)
            left_at = torch.full_like(left, depths[-1])
        sure = _sure(_wide(logits).softmax(-1).amax(-1), threshold)
        answered[left] = logits
        left_at[left[sure]] = depth
        stays = ~sure
        left = left[stays]
        if not len(left):
            break
        kept = None if bool(stays.all()) else stays
    assert answered is not None
    assert left_at is not None
    return EarlyAnswers(answered, left_at)


def exits_taken(confidence: Tensor, threshold: float) -> Tensor:
    """Which depth of `[rows, depths]` each row leaves at, `[rows]` int64: what `leave_early` finds out one by one."""
    sure = _sure(confidence, threshold)
    sure[:, -1] = True
    return sure.int().argmax(1)


def wilson_interval(correct: int, answers: int) -> tuple[float, float]:
    """The 95 % interval of Wilson for a fraction of `correct` in `answers` ≥ 1 independent answers."""
    square = _NORMAL_QUANTILE**2
    fraction = correct / answers
    center = fraction + square / (2 * answers)
    half = _NORMAL_QUANTILE * math.sqrt(fraction * (1 - fraction) / answers + square / (4 * answers**2))
    low, high = ((center + sign * half) / (1 + square / answers) for sign in (-1, 1))
    # At the ends rounding would leave [0, 1] by a unit in the last place.
    return (0.0 if correct == 0 else low), (1.0 if correct == answers else high)


def _sure(confidence: Tensor, threshold: float) -> Tensor:
    return confidence >= (threshold if threshold < 1 else 2.0)  # rounding makes a probability 1, and nobody sure


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
