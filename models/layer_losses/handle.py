"""The handle of `attach_layer_losses`: what runs in the place of a model's forward.

Nothing of the model is written anew. Its own forward runs, with three of its modules answering differently while it
does: the layers' inputs are noted (the input of layer l+1 is the output of layer l, and unlike an output seen by a hook
it carries its gradient under reentrant checkpointing too); a classifier's head passes its input on, so that what comes
out are features; and the base model of a classifier, asked again, answers with a noted state instead of running.
Whatever lies between (pooling, dropout, dense layers) is then the model's own, for every depth.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses.first_forward import Reading, check_first_forward
from cdt_fast.models.layer_losses.heads import effective_linear, in_use
from cdt_fast.models.layer_losses.outputs import (
    LAYER_LOSSES,
    LOSS_COUNT,
    ignore_in_predictions,
    with_layer_losses,
    with_router_loss,
)
from cdt_fast.models.layer_losses.parts import CLASSIFIER, LANGUAGE_MODEL, ModelParts, parts_now, unsupported
from cdt_fast.models.layer_losses.patch import Patch, state_of
from cdt_fast.models.layer_losses.targets import IGNORED, check_count, targets_of
from cdt_fast.ops import layerwise_cross_entropy
from cdt_fast.ops.common import in_autocast, weights_of_depths

MARK = "_cdt_fast_layer_losses"

InnerPooling = Literal["own", "mean"]


@dataclass
class _Pass:
    """What one forward has noted whose depths are read. It is dropped when that forward ends, also by an error."""

    targets: Tensor | None  # None: logits are read, not losses
    weights: Tensor | None
    whole_logits: bool
    states: dict[int, Tensor] = field(default_factory=dict)
    features: Tensor | None = None  # [B, T, d], what the head of a language model was given
    inner: list[Tensor] = field(default_factory=list)  # what it is given for the inner depths; of a classifier rows
    base_output: Any = None
    replayed: Tensor | None = None  # what the base model is to answer with
    mean: bool = False  # whether inner depths are read by the mean of the tokens
    mask: Tensor | None = None  # [B, T], of the tokens that count there
    autocast: tuple[str, torch.dtype] | None = None  # of the head, which something around the model's forward may set


class LayerLosses:
    """The handle of `attach_layer_losses`.

    Attributes:
        taps: the depths that are read, as numbers of 0..L.
        num_constraints: their number less one, the `layers` of a `DescentConstraints`.
        kind: what the model is: "causal language model", which reads every token, or "classifier", one row a label.
        shifts_labels: whether the model's forward shifts `labels` by one, so that the first label of a sequence counts
            nowhere. Most causal language models do, Bart's and Whisper's decoders do not, nor does a classifier.
    """

    def __init__(
        self,
        parts: ModelParts,
        taps: tuple[int, ...],
        inner_fraction: float,
        generator: torch.Generator | None,
        inner_pooling: InnerPooling,
    ) -> None:
        self.taps = taps
        self.kind, self.shifts_labels = parts.kind, parts.shifts_labels
        self._mean = inner_pooling == "mean"
        self.num_constraints = len(taps) - 1
        self._parts = parts
        self._inner_fraction = inner_fraction
        self._generator = generator
        self._weights: Tensor | None = None
        self._pass: _Pass | None = None
        self._evaluating = False
        self._reads_logits = False
        self._checked = False
        self._attached = True
        answers = {parts.model: self._forward, parts.head: self._head}
        if parts.kind == CLASSIFIER:
            answers[parts.base] = self._base
        self._patches = [Patch(module, answer) for module, answer in answers.items()]
        self._hooks = [
            parts.layers[depth].register_forward_pre_hook(functools.partial(self._note, depth), with_kwargs=True)
            for depth in taps
            if depth < len(parts.layers)
        ]
        if parts.kind == LANGUAGE_MODEL and parts.tail:
            note = functools.partial(self._note, len(parts.layers))
            self._hooks.append(parts.tail[0].register_forward_pre_hook(note, with_kwargs=True))
        ignore_in_predictions(parts.model.config)
        setattr(parts.model, MARK, self)

    @property
    def weights(self) -> Tensor | None:
        """w, `[depths]`, one number for each of `taps`, negative and zero too; set it before a forward, None for none.

        A tensor is taken as it is: one that changes in place need not be set again.
        """
        return self._weights

    @weights.setter
    def weights(self, weights: Tensor | Sequence[float] | None) -> None:
        self._weights = weights_of_depths(weights, len(self.taps))

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[LayerLosses]:
        """In this block `loss` is that of the last layer whatever the weights, every token counts at every depth, and
        logits are returned. The modules' own training mode and torch's gradient mode stay as they are."""
        before, self._evaluating = self._evaluating, True
        try:
            yield self
        finally:
            self._evaluating = before

    def depth_logits(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """The logits at each of `taps` for one batch, through the model's own norm, pooling and head; differentiable.

        They are what the model would return if its layers after that depth were not there; those of the last depth are
        the model's own.

        Args:
            args, kwargs: what the model's forward takes. Labels are not needed, and not looked at.

        Returns:
            A tensor a depth: `[B, T, V]` of a language model, `[B, classes]` of a classifier.

        Raises:
            InputError: `remove` was called; or as from the first forward of `attach_layer_losses`.
        """
        if not self._attached:
            raise InputError("the layer losses were removed from this model: attach them again to read its depths")
        self._reads_logits = True
        try:
            return self._parts.model(*args, **kwargs)
        finally:
            self._reads_logits = False

    def remove(self) -> None:
        """Give the model back as it was."""
        if not self._attached:
            return
        self._attached = False
        for handle in self._hooks:
            handle.remove()
        for patch in self._patches:
            patch.remove()
        delattr(self._parts.model, MARK)

    def _forward(self, patch: Patch, *args: Any, **kwargs: Any) -> Any:
        """The forward of the model."""
        kwargs.update(zip(patch.names, args, strict=False))
        weights = kwargs.pop("depth_weights", None)
        reads_losses = self._attached and not (kwargs.get("labels") is None and kwargs.get("shift_labels") is None)
        if not reads_losses and not self._reads_logits:
            return patch.original(**kwargs)
        labels, shifted, items = (kwargs.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch"))
        as_tuple = not _given(kwargs.get("return_dict"), getattr(self._parts.model.config, "return_dict", True))
        kwargs["return_dict"] = True
        if not torch.compiler.is_compiling():
            self._update_parts()
        run = functools.partial(patch.original, **kwargs)
        # How the inner depths of a classifier are read. The first forward is checked without.
        pooling = {"mean": self._mean, "mask": kwargs.get("attention_mask")}
        if self._reads_logits:
            self._check(patch, kwargs)
            _, depths = self._read(run, _Pass(None, None, whole_logits=False, **pooling))
            return depths[: len(self.taps)]
        shift = self.shifts_labels and shifted is None
        targets = targets_of(labels if shifted is None else shifted, self._parts.classes, shift=shift)
        count = check_count(targets, items, shifted=shift)
        weights = self._weights if weights is None else weights_of_depths(weights, len(self.taps))
        self._check(patch, kwargs)
        this = _Pass(targets, None if self._evaluating else weights, self._whole_logits(), **pooling)
        output, (total, sums, *rows) = self._read(run, this)
        loss = with_router_loss(self._parts.model, total / (count if items is None else items), output)
        logits = rows[0] if rows else output.logits if this.whole_logits else None
        count = count.to(sums.device, non_blocking=True)
        means = sums / count.clamp(min=1)
        fields = {LAYER_LOSSES: means, LOSS_COUNT: count}
        output = with_layer_losses(output, loss=loss, logits=logits, **fields)
        return output.to_tuple() if as_tuple else output

    def _update_parts(self) -> None:
        """Follow what may change of the model, or InputError: it changed in what may not."""
        parts = parts_now(self._parts)
        if parts != self._parts:
            self._parts, self._checked = parts, False

    def _check(self, patch: Patch, arguments: dict[str, Any]) -> None:
        """Once, and again after a change: that the depths are read as the model reads its last."""
        if not self._checked:
            check_first_forward(self._parts, self.taps, patch, self._reading, arguments)
            self._checked = True

    def _reading(self, run: Callable[[], Any], labels: Tensor) -> Reading:
        """What the first forward is checked by; see there."""
        targets = targets_of(labels, self._parts.classes, shift=self.shifts_labels)
        this = _Pass(targets, None, whole_logits=True)
        output, (total, *_) = self._read(run, this)
        loss = with_router_loss(self._parts.model, total / (targets != IGNORED).sum(), output)
        last = output.logits if this.features is None else this.features
        dtype = this.autocast[1] if this.autocast else output.logits.dtype
        return Reading(loss, dtype, this.inner, last)

    def _read(self, run: Callable[[], Any], this: _Pass) -> tuple[Any, Any]:
        """The output of `run`, a forward without labels, and what the head makes of the states that it has passed.

        The head is called as a module, so that what gathers the weight of a sharded one does so. The last norm of a
        language model runs again there, for sharded together with the head its weight is there only between the call
        and its backward.
        """
        self._pass = this
        try:
            output = run()
            rows = self._parts.kind == CLASSIFIER
            with torch.autocast(*this.autocast) if this.autocast else contextlib.nullcontext():
                return output, self._parts.head(self._rows(this, output, run) if rows else self._states(this))
        finally:
            self._pass = None

    def _whole_logits(self) -> bool:
        return self._evaluating or self._parts.kind == CLASSIFIER or not self._parts.model.training

    def _rows(self, this: _Pass, output: Any, again: Callable[[], Any]) -> list[Tensor]:
        """What the head of a classifier is given for each depth and, whether it is tapped or not, the last."""
        for state in self._inner_states(this):
            this.replayed = self._parts.read(state)
            if this.mean:
                this.replayed = mean_of_tokens(this.replayed, this.mask)
            this.inner.append(again().logits)
        features, targets = [*this.inner, output.logits], this.targets
        for rows in features:
            if targets is not None and (rows.dim() != 2 or len(rows) != targets.numel() or targets.dim() != 1):
                raise InputError(
                    f"labels must have one class a row, and the head read one row a sequence: got labels "
                    f"{tuple(targets.shape)}, rows {tuple(rows.shape[:-1])}"
                )
        return features

    def _states(self, this: _Pass) -> list[Tensor]:
        """The states of a language model at each depth and, whether it is tapped or not, the last, before its norm."""
        given = None if this.features is None else this.features.shape[:-1]
        if this.targets is not None and given != this.targets.shape:
            raise InputError(
                f"labels have shape {tuple(this.targets.shape)} but the head was given tokens "
                f"{None if given is None else tuple(given)}: give one label a token, and no logits_to_keep"
            )
        last = this.states.get(len(self._parts.layers), this.features)
        if last is None:
            raise unsupported(self._parts.model, "its head did not run")
        return [*self._inner_states(this), last]

    def _head(self, patch: Patch, features: Any, *args: Any, **kwargs: Any) -> Any:
        """The forward of the head: losses for a list of states; within a pass, what it notes; else its own."""
        this = self._pass
        if this is None:
            return patch.original(features, *args, **kwargs)
        classifier = self._parts.kind == CLASSIFIER
        if isinstance(features, list):
            if classifier and this.targets is None:
                return [patch.original(rows) for rows in features]
            if classifier:
                return *self._losses(this, features), patch.original(features[-1])
            features = [self._parts.read(state) for state in features]
            this.inner = features[:-1]
            for rows in features:
                if this.features is not None and rows.shape != this.features.shape:
                    shapes = f"{tuple(rows.shape)} as read, {tuple(this.features.shape)} in its forward"
                    raise unsupported(self._parts.model, f"what its head is given has another shape: {shapes}")
            if this.targets is None:
                return [self._parts.capped(patch.original(rows)) for rows in features]
            return self._losses(this, features)
        if in_autocast(features):
            device = features.device.type
            this.autocast = device, torch.get_autocast_dtype(device)
        if classifier:
            return features
        this.features = features
        if this.whole_logits:
            return patch.original(features, *args, **kwargs)
        with torch.no_grad():
            # The model may go on computing with logits (a softcap, a scale): these are for it to do so.
            return patch.original(features[:, :1], *args, **kwargs)

    def _base(self, patch: Patch, *args: Any, **kwargs: Any) -> Any:
        """The forward of the base model of a classifier: in a replay, what it returned with another last state."""
        this = self._pass
        if this is None:
            return patch.original(*args, **kwargs)
        if this.replayed is None:
            this.base_output = patch.original(*args, **kwargs)
            return this.base_output
        return self._with_state(this.base_output, this.replayed)

    def _with_state(self, output: Any, state: Tensor) -> Any:
        """What the base model returned, with another last state."""
        changed: dict[str, Tensor | None] = {"last_hidden_state": state}
        if "pooler_output" in output:
            changed["pooler_output"] = self._parts.pool(state)
        return type(output)(**{**output, **changed})

    def _losses(self, this: _Pass, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The total that becomes the loss, and the sums of the depths that are tapped."""
        parts = self._parts
        assert this.targets is not None
        weight, bias = effective_linear(in_use(parts.head))
        if not in_autocast(weight):
            features = [rows.to(weight.dtype) for rows in features]
        if parts.scale != 1.0:
            features = [rows * parts.scale for rows in features]
            bias = None if bias is None else bias * parts.scale
        weights, tapped = this.weights, len(self.taps)
        if weights is not None and len(features) > tapped:
            weights = torch.cat([weights, weights.new_zeros(1)])
        training = parts.model.training and not self._evaluating
        total, sums = layerwise_cross_entropy(
            features,
            weight,
            this.targets,
            bias,
            depth_weights=weights,
            ignore_index=IGNORED,
            reduction="sum",
            softcap=parts.softcap,
            inner_fraction=self._inner_fraction if training else 1.0,
            generator=self._generator,
        )
        return sums[-1] if weights is None else total, sums[:tapped]

    def _inner_states(self, this: _Pass) -> list[Tensor]:
        """The noted inputs of the layers, by depth."""
        depths = [depth for depth in self.taps if depth < len(self._parts.layers)]
        for depth in depths:
            if depth not in this.states:
                raise InputError(
                    f"layer {depth + 1} did not run in this forward, so that depth {depth} has no state: switch "
                    "layerdrop off, or leave the depth out of taps"
                )
        return [this.states[depth] for depth in depths]

    def _note(self, depth: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # In the backward a checkpointed layer runs again; then there is no pass. The final norm may run on the
        # embeddings too, and runs again for each depth: its state is the one before the head is called.
        this, last = self._pass, depth == len(self._parts.layers)
        if this is not None and (this.features is None if last else depth not in this.states):
            this.states[depth] = state_of(args, kwargs)


def mean_of_tokens(state: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the tokens that count in the place of every token, so that whichever a head reads is that.

    Args:
        state: `[B, T, d]`.
        mask: `[B, T]`, zero for padding; None: all tokens count.
    """
    if mask is None:
        return state.mean(1, keepdim=True).expand_as(state)
    counted = mask.to(state.dtype).unsqueeze(-1)
    return ((state * counted).sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)).expand_as(state)


def _given(value: bool | None, default: bool) -> bool:
    return default if value is None else value
