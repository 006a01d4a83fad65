"""Whether a model reads its last layer as `ModelParts` says, which the inner depths are read by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses.parts import LANGUAGE_MODEL, ModelParts, head_of


def check_head(parts: ModelParts) -> None:
    """Require the head to be the module that it was when the losses were attached.

    Raises:
        InputError: another one stands in its place, whose own weights the losses would not see.
    """
    if head_of(parts.kind, parts.model, parts.base) is not parts.head:
        raise InputError(
            f"the head of this {type(parts.model).__name__} was replaced after attach_layer_losses (peft does so, for "
            "an adapter on the head and in merge_and_unload): call remove() before that, and attach after"
        )


@torch.no_grad()
def check_readout(parts: ModelParts, noted: Tensor, expected: Tensor, base_output: Any) -> None:
    """Require what stands between the last layer and the head to be `ModelParts.tail`, and the pooler.

    Args:
        noted: `[B, 1, d]`, the output of the last layer for the first token.
        expected: `[B, T, d]`, what the head was given, or for a classifier what the base model returned.
        base_output: of the base model of a classifier.

    Raises:
        InputError: something else stands there.
    """
    between = "between its last layer and its head"
    _compare(parts, parts.read(noted), expected[:, :1], between)
    pooled = None if parts.kind == LANGUAGE_MODEL else parts.pool(expected)
    if pooled is not None:
        _compare(parts, pooled, base_output["pooler_output"], between)


@torch.no_grad()
def check_logits(parts: ModelParts, probe: Tensor, logits: Tensor) -> None:
    """Require what the model does to its logits to be what `scale` and `softcap` say.

    Args:
        probe: `[B, 1, V]`, what the head answered for the first token.
        logits: `[B, T, V]`, what the model returned.

    Raises:
        InputError: it does something else.
    """
    probe = probe * parts.scale
    if parts.softcap is not None:
        probe = parts.softcap * torch.tanh(probe / parts.softcap)
    _compare(parts, probe, logits[:, :1], "after its head")


def _compare(parts: ModelParts, found: Tensor, expected: Tensor, where: str) -> None:
    # Not (a > b) rather than a <= b: where a model diverged, NaN is not the fault of its structure.
    same = found.shape == expected.shape
    if not same or bool((found - expected).abs().max() > 0.02 * expected.abs().max()):
        raise InputError(
            f"no layer losses for a {type(parts.model).__name__}: it computes something {where} that is not known "
            "here, so that its inner depths cannot be read as its last one is"
        )
