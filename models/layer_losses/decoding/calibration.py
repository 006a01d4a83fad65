"""The confidence from which on an exit is trusted, for a stated agreement with the whole model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cdt_fast.checks import check_number
from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses.decoding.decoder import check_exit, check_language_model
from cdt_fast.models.layer_losses.decoding.tuning import continuations
from cdt_fast.models.layer_losses.parts import ModelParts

_SIGMAS = 1.96  # of a two-sided interval of 95 %


@dataclass(frozen=True)
class Calibration:
    """A threshold of `ConfidentExitDecoder`, and what it did on the prompts that it was chosen on.

    Attributes:
        threshold: the least probability at which the exit's token is taken; 1 where no other keeps the agreement.
        agreement: the share of the tokens that were then the whole model's, given the whole model's text before them.
        least_agreement: the lower end of its 95 % interval (Wilson), which the threshold was chosen by.
        exit_share: the share of the tokens that were taken from the exit.
    """

    threshold: float
    agreement: float
    least_agreement: float
    exit_share: float


def calibrate_exit(
    parts: ModelParts,
    prompts: Sequence[Any],
    exit: int,
    agreement: float,
    *,
    new_tokens: int,
    draft_tokens: Tensor | None,
) -> Calibration:
    """See `LayerLosses.calibrate_exit`."""
    check_language_model(parts)
    exit = check_exit(parts, exit)
    wanted = check_number("agreement", agreement, "a number in (0, 1)", lambda number: 0 < number < 1)
    _, _, named = continuations(parts, prompts, [exit], new_tokens, draft_tokens)
    agree = torch.cat([one.agree[exit] for one in named])
    confidence, order = torch.cat([one.confidence[exit] for one in named]).double().sort(descending=True)
    if not len(agree):
        raise InputError("calibrating an exit needs prompts that the model continues, got none that it does")
    # By how many tokens are taken: those of the largest confidence first, none among equals left out.
    wrong = (~agree[order]).cumsum(0)
    best = Calibration(1.0, 1.0, _lower_end(0, len(agree)), 0.0)
    for taken in range(1, len(agree) + 1):
        if taken < len(agree) and confidence[taken] == confidence[taken - 1]:
            continue
        errors = int(wrong[taken - 1])
        least = _lower_end(errors, len(agree))
        if least >= wanted:
            share = taken / len(agree)
            best = Calibration(float(confidence[taken - 1]), 1 - errors / len(agree), least, share)
    return best


def _lower_end(errors: int, count: int) -> float:
    """Of the Wilson interval of the share of `count` that are no errors."""
    share, square = 1 - errors / count, _SIGMAS**2
    middle = share + square / (2 * count)
    return (middle - _SIGMAS * math.sqrt(share * (1 - share) / count + square / (4 * count**2))) / (1 + square / count)
