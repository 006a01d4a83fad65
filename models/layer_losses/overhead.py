"""What the heads of the inner depths will cost, and what they may gain in decoding, before training starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cdt_fast.checks import check_integer, check_number
from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses.heads import in_use, size_of_linear
from cdt_fast.models.layer_losses.parts import LANGUAGE_MODEL, check_taps, find_parts


def predicted_overhead(
    model: Any, taps: Sequence[int] | None = None, inner_fraction: float = 1.0, inner_kl: float = 0.0
) -> float:
    """Training FLOP of a causal language model with layer losses, over those without: 1.3 is 30 % more.

    A matrix of P entries costs 6 P FLOP a token, forward and backward; so does the head `[V, d]` at each inner depth,
    for the tokens read there; with `inner_kl` and a fraction of the tokens the last depth's logits at those are a
    forward product more. Attention's own products are left out, so that for long sequences the overhead is less.
    Where most matrices are frozen, as under LoRA, their gradients are not computed and it is more.
    A mixture of experts counts all of its experts, and its overhead is more than predicted.

    Args:
        model: as for `attach_layer_losses`; it may be on the meta device.
        taps: as there.
        inner_fraction, inner_kl: as there.

    Raises:
        InputError: the model is no causal language model that `attach_layer_losses` takes, or a value is out of range.
    """
    fraction = check_number("inner_fraction", inner_fraction, "a number in (0, 1]", lambda number: 0 < number <= 1)
    share = check_number("inner_kl", inner_kl, "a number in [0, 1]", lambda number: 0 <= number <= 1)
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
    teacher = 1 / 3 if share and inner and fraction < 1 else 0.0
    return 1.0 + (inner + teacher) * fraction * head / (sum(layers.values()) + head)


def predicted_speedup(
    model: Any, exit: int, acceptance: float, *, draft_rows: int | None = None, drafts: int | None = None
) -> tuple[float, int]:
    """How much faster a causal language model decodes with an exit that drafts, and with how many drafts.

    With k drafts of which each is kept with probability a, a round gives (1 − a^(k+1)) / (1 − a) tokens, and reads the
    weights of k + 1 times the first part, of k heads of the draft, and once those of the other layers and the head:
    decoding one by one waits for memory alone. Attention's own products and what a call costs by itself are left out.

    Args:
        model: as for `attach_layer_losses`; it may be on the meta device.
        exit: the depth that drafts.
        acceptance: a, the share of drafts that are kept, given that those before were.
        draft_rows: tokens that the draft can name; None: all.
        drafts: k; None: the best.

    Returns:
        Tokens a second over those of the model alone, and k.

    Raises:
        InputError: the model is no causal language model that `attach_layer_losses` takes, or a value is out of range.

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", theorem 3.8.
    """
    parts = find_parts(model)
    a = check_number("acceptance", acceptance, "a number in [0, 1]", lambda number: 0 <= number <= 1)
    exit = check_integer("exit", exit, 1)
    if parts.kind != LANGUAGE_MODEL or exit >= len(parts.layers):
        raise InputError(
            f"exit must be a depth of 1 to {len(parts.layers) - 1} of a causal language model, got {exit} of a "
            f"{type(parts.model).__name__}"
        )
    outputs, width = size_of_linear(in_use(parts.head))
    head, draft_head = outputs * width, min(draft_rows or outputs, outputs) * width
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in parts.layers]
    first, behind = sum(sizes[:exit]), sum(sizes[exit:])

    def speed(k: int) -> float:
        tokens = sum(a**kept for kept in range(k + 1))
        return tokens * (first + behind + head) / (k * (first + draft_head) + first + behind + head)

    best = max(range(1, 11), key=speed) if drafts is None else check_integer("drafts", drafts, 1)
    return speed(best), best
