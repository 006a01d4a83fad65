"""What the heads of the inner depths will cost, before training starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cdt_fast.checks import check_number
from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses.heads import in_use, size_of_linear
from cdt_fast.models.layer_losses.parts import LANGUAGE_MODEL, check_taps, find_parts


def predicted_overhead(model: Any, taps: Sequence[int] | None = None, inner_fraction: float = 1.0) -> float:
    """Training FLOP of a causal language model with layer losses, over those without: 1.3 is 30 % more.

    A matrix of P entries costs 6 P FLOP a token, forward and backward; so does the head `[V, d]` at each inner depth,
    for the tokens read there. Attention's own products are left out, so that for long sequences the overhead is
    less. Where most matrices are frozen, as under LoRA, their gradients are not computed and it is more.
    A mixture of experts counts all of its experts, and its overhead is more than predicted.

    Args:
        model: as for `attach_layer_losses`; it may be on the meta device.
        taps: as there.
        inner_fraction: as there.

    Raises:
        InputError: the model is no causal language model that `attach_layer_losses` takes, or a value is out of range.
    """
    fraction = check_number("inner_fraction", inner_fraction, "a number in (0, 1]", lambda number: 0 < number <= 1)
    parts = find_parts(model)
    if parts.kind != LANGUAGE_MODEL:
        raise InputError(
            f"model must be a causal language model, got a {type(parts.model).__name__}: a classifier reads one row "
            "a sequence, which costs next to nothing"
        )
    outputs, width = size_of_linear(in_use(parts.head))
    head = outputs * width
    layers = {
        id(parameter): parameter.numel()
        for layer in parts.layers
        for parameter in layer.parameters()
        if parameter.dim() >= 2
    }
    inner = sum(depth < len(parts.layers) for depth in check_taps(taps, len(parts.layers)))
    return 1.0 + inner * fraction * head / (sum(layers.values()) + head)
