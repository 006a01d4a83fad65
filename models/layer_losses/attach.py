"""`attach_layer_losses`: the forward of a transformers model that also returns the losses of its depths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch

from cdt_fast.checks import check_choice, check_number
from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses.handle import MARK, InnerPooling, LayerLosses
from cdt_fast.models.layer_losses.parts import CLASSIFIER, check_taps, find_parts


def attach_layer_losses(
    model: Any,
    taps: Sequence[int] | None = None,
    *,
    inner_fraction: float = 1.0,
    generator: torch.Generator | None = None,
    inner_pooling: InnerPooling = "own",
) -> LayerLosses:
    """Make the forward of a transformers classifier or causal language model return the losses of its depths too.

    A forward with `labels` then returns, besides what it did, `layer_losses` `[depths]`, the mean cross-entropy at each
    depth (in nats, float32 or float64), and `layer_loss_count` `[]`, the number of rows (classifier) or tokens
    (language model: its labels are shifted by one where its own loss shifts them) that it is a mean over, those whose
    label is not −100; where there is none of them the losses are 0. Every depth is read through the model's own final
    norm, pooling and head; dropout of the readout draws anew at each depth. A language model in training mode forms no
    logits of all tokens, and returns none.

    With weights, `loss` is `Σ_l w_l ℓ_l`, in one fused pass, and `layer_losses` is detached; without, `loss` is the
    model's own, that of the last layer, and `layer_losses` is differentiable. Where the forward is given
    `num_items_in_batch`, `loss` is divided by that in place of the count. Weights are those of the handle, or the
    forward's argument `depth_weights=`.

    A mixture of experts that returns the loss of its routers (`output_router_logits`) has it added to `loss`, times the
    model's own factor and whatever the weights, as in its own forward.

    The first forward with labels is checked against the model, in a few further forwards of a few tokens: the last
    depth's loss is the model's own, and inner depths are the model without the layers behind them.

    Works inside DDP, FSDP2, accelerate and peft, attached to the model before or after they wrap it; where peft puts an
    adapter on the head, after. Precision, checkpointing and the number of classes may change later; a forward after
    the base model, a layer, the last norm or the head was replaced is an InputError.

    Args:
        model: a …ForSequenceClassification, …ForImageClassification, …ForCausalLM or …LMHeadModel of transformers.
        taps: the depths to read, increasing: 0 is the input of the first layer, l the output of layer l, −1 the last.
            None: all L+1. Depths that are not read keep no state.
        inner_fraction: in training, the share of a language model's tokens that the depths before the last are
            estimated from, drawn anew in each forward, without bias. For a language model alone.
        generator: of that draw. None: torch's own, whose state trainers save and restore.
        inner_pooling: how a classifier's depths before the last are read: "own", as its last (an encoder mostly by its
            first token, which early layers have not filled yet), or "mean", with the mean of the tokens in the place of
            each: what `cdt-fast train text` takes (docs/results.md). For a classifier alone.

    Returns:
        A handle: its `weights` are set before each forward, and its `remove` undoes everything.

    Raises:
        InputError: the model or its head is of no known kind, or has layer losses already; an argument is out of range.
            From the first forward: its losses are not those of the model. From any: labels of another shape or dtype,
            or, where they are on the CPU, outside of the classes or all ignored. For labels on a GPU there is no
            host sync: these cases give NaN there.

    Source: "A Constrained Optimization Perspective of Unrolled Transformers", the layerwise losses of a classifier.
    """
    parts = find_parts(model)
    name = type(parts.model).__name__
    if hasattr(parts.model, MARK):
        raise InputError(f"this {name} has layer losses already: use that handle, or call its remove() first")
    fraction = check_number("inner_fraction", inner_fraction, "a number in (0, 1]", lambda number: 0 < number <= 1)
    if fraction < 1 and parts.kind == CLASSIFIER:
        raise InputError(
            f"inner_fraction must be 1 for a classifier, got {inner_fraction}: it reads one row a sequence"
        )
    pooling = check_choice("inner_pooling", inner_pooling, get_args(InnerPooling))
    if pooling != "own" and parts.kind != CLASSIFIER:
        raise InputError(f"inner_pooling must be 'own' for a {parts.kind}, got {pooling!r}: it reads every token")
    return LayerLosses(parts, check_taps(taps, len(parts.layers)), fraction, generator, pooling)
