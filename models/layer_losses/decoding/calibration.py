"""The confidence from which on an exit is trusted, for a stated agreement with the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.models.early_exit import Calibration, least_threshold
from cdt_fast.models.layer_losses.decoding.decoder import check_exit, check_language_model
from cdt_fast.models.layer_losses.decoding.tuning import continuations
from cdt_fast.models.layer_losses.parts import ModelParts


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
    _, _, named = continuations(parts, prompts, [exit], new_tokens, draft_tokens)
    agree = torch.cat([one.agree[exit] for one in named])
    confidence = torch.cat([one.confidence[exit] for one in named]).double()
    if not len(agree):
        raise InputError("calibrating an exit needs prompts that the model continues, got none that it does")
    return least_threshold(confidence.unsqueeze(1), agree.unsqueeze(1), agreement)
