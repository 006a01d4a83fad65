"""`attach_layer_losses`: the forward of a transformers model that also returns the losses of its depths."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from cdt_fast.checks import InputError, check_choice
from cdt_fast.models.layer_losses.check import check_first_forward
from cdt_fast.models.layer_losses.layout import Layout, find_layout, in_use, weight_and_bias
from cdt_fast.models.layer_losses.outputs import IGNORED, ignore_in_predictions, router_loss, targets_of, with_fields
from cdt_fast.models.layer_losses.reading import DepthReader, Form, mean_of_tokens
from cdt_fast.models.layer_losses.wrapping import WrappedForward
from cdt_fast.ops import layerwise_cross_entropy
from cdt_fast.ops.common import LayerwiseLosses, in_autocast, weights_of_depths

InnerPooling = Literal["own", "mean"]
_MARK = "_cdt_fast_layer_losses"
_READS_LOGITS = "_cdt_fast_reads_logits"  # the argument by which `depth_logits` asks the forward for them

# Before, the compiler looks past a forward that is replaced while it traces.
_COMPILES = TorchVersion(torch.__version__) >= "2.12"


def attach_layer_losses(
    model: Any, taps: Sequence[int] | None = None, *, inner_pooling: InnerPooling = "own"
) -> LayerLosses:
    """Make the forward of a transformers classifier or causal language model return the losses of its depths too.

    A forward with `labels` then also returns `layer_losses` `[depths]`, the mean cross-entropy ℓ_l at each depth (in
    nats, float32 or float64), and `layer_loss_count` `[]`, the number of rows or tokens (a language model's labels are
    shifted by one where its own loss shifts them) with a label other than −100; without any the losses are 0. Every
    depth is read through the model's own final norm, pooling and head, with a dropout of its own.

    With `weights` set on the handle, `loss` is `Σ_l w_l ℓ_l`, in one fused pass, and `layer_losses` is detached;
    without, `loss` is the model's own, that of the last layer, and `layer_losses` is differentiable.
    `num_items_in_batch` divides `loss` in place of the count. The loss of a mixture's routers
    (`output_router_logits`) is added to `loss` as in the model's own forward. In training a language model computes no
    logits when it is given labels.

    The first forward with labels is compared with the model in a few further forwards of a few tokens. Later changes
    (the head, its classes, adapters, precision, checkpointing) are followed, and compared again, by a forward that is
    not compiled, and not before one; another number of layers is an InputError. The comparison cannot see a module
    between norm and head that is the identity at that moment, nor a loss term of training alone, unless that forward is
    in training mode and the outermost module adds it.
    Works inside DDP, FSDP2, accelerate and peft, attached before or after they wrap the model.

    Args:
        model: a …ForSequenceClassification, …ForTokenClassification, …ForImageClassification, …ForCausalLM,
            …LMHeadModel or decoder-only …ForConditionalGeneration of transformers.
        taps: the depths to read, increasing: 0 is the input of the first layer, l the output of layer l, −1 the last.
            None: all L+1. Depths that are not read keep no state.
        inner_pooling: how a classifier's depths before the last are read: "own", as its last (an encoder mostly by its
            first token, which early layers have not filled yet), or "mean", with the mean of the tokens in the place of
            each: what `cdt-fast train text` takes (docs/results.md). Not where tokens have labels.

    Returns:
        A handle: its `weights` are set before each forward, and its `remove` undoes everything.

    InputError: the model or its head is of no known kind, or has layer losses already; an argument is out of range.
    From the first forward: its logits or its loss are not those of the model. From any: labels of another shape or
    dtype, or, on the CPU, outside of the classes or all ignored (on a GPU, without a host sync, NaN).

    Source: "A Constrained Optimization Perspective of Unrolled Transformers", the layerwise losses of a classifier.
    """
    layout = find_layout(model)
    if hasattr(layout.model, _MARK):
        name = type(layout.model).__name__
        raise InputError(f"this {name} has layer losses already: use that handle, or call its remove() first")
    pooling = check_choice("inner_pooling", inner_pooling, get_args(InnerPooling))
    if pooling != "own" and layout.labels_tokens:
        kind = "causal language model" if layout.reads_tokens else "classifier of tokens"
        raise InputError(f"inner_pooling must be 'own' for a {kind}, got {pooling!r}")
    return LayerLosses(layout, _check_taps(taps, len(layout.layers)), pooling)


class LayerLosses:
    """The handle of `attach_layer_losses`.

    Attributes:
        model: the model of transformers, without the wrappers around it.
        taps: the depths that are read, as numbers of 0..L.
        layers: L.
        num_constraints: the number of `taps` less one, the `layers` of a `DescentConstraints`.
        reads_tokens: the model is a causal language model; else a classifier, of rows or of tokens.
        shifts_labels: the model's forward shifts `labels` by one, so that the first label of a sequence does not
            count. Most causal language models do, Bart's and Whisper's decoders do not, nor does a classifier.
        weights: w, `[depths]`, one number for each of `taps`, negative and zero too, or None. Set it before a forward;
            a tensor that changes in place need not be set again.
        router_factor: what the loss of a mixture's routers is multiplied by, or None: by the model's own factor.
        items: what divides `loss` where a forward is given no `num_items_in_batch`, until it is set to None again. FSDP
            does not round it, as it rounds arguments.
        measured: `layer_losses`, detached, and `layer_loss_count` of the last forward, as `DescentConstraints.record`
            takes them: before FSDP rounds what the head and the model return.
    """

    # A misspelled `weights` is an error and not a new attribute.
    __slots__ = (
        *("_checked", "_layout", "_pooling", "_reader", "_wrapped", "items", "layers", "measured", "model"),
        *("num_constraints", "reads_tokens", "router_factor", "shifts_labels", "taps", "weights"),
    )

    def __init__(self, layout: Layout, taps: tuple[int, ...], inner_pooling: InnerPooling) -> None:
        self.model, self.taps, self.layers = layout.model, taps, len(layout.layers)
        self.num_constraints = len(taps) - 1
        self.reads_tokens, self.shifts_labels = layout.reads_tokens, layout.shifts_labels
        self._pooling = inner_pooling
        self.weights: Tensor | Sequence[float] | None = None
        self.router_factor: float | None = None
        self.items: Tensor | float | None = None
        self.measured: tuple[Tensor, Tensor] | None = None
        self._layout, self._reader = layout, DepthReader(layout, taps)
        self._checked: Layout | None = None  # the layout that has been compared with the model
        self._wrapped = WrappedForward(layout.model, self._forward)
        ignore_in_predictions(layout.model.config)
        setattr(layout.model, _MARK, self)

    def __getstate__(self) -> Any:
        # For a copy of the model, of its average say: it has its own loss, as nobody would set these of the copy.
        unset = dict.fromkeys(("items", "measured", "router_factor", "weights"))
        return None, {**{name: getattr(self, name) for name in self.__slots__}, **unset}

    def depth_logits(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Return the logits at each of `taps`, `[B, T, V]` or `[B, classes]`, through the model's own norm, pooling
        and head; differentiable. Arguments are those of the model's forward; labels are ignored.

        InputError: `remove` was called; or as from the first forward of `attach_layer_losses`.
        """
        if getattr(self.model, _MARK, None) is not self:
            raise InputError("the layer losses were removed from this model: attach them again to read its depths")
        return self.model(*args, **kwargs, **{_READS_LOGITS: True})

    def remove(self) -> None:
        """Give the model back as it was."""
        if getattr(self.model, _MARK, None) is self:
            self._reader.remove()
            self._wrapped.remove()
            delattr(self.model, _MARK)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run in the place of the model's forward."""
        kwargs.update(zip(self._wrapped.names[: len(args)], args, strict=True))
        if "depth_weights" in kwargs:  # transformers' **kwargs would swallow it
            raise InputError("a forward takes no depth_weights: set weights on the handle of attach_layer_losses")
        if (ignored := kwargs.get("ignore_index", IGNORED)) != IGNORED:
            raise InputError(f"ignore_index must be {IGNORED}, got {ignored}: give the labels to be ignored that value")
        reads_logits = kwargs.pop(_READS_LOGITS, False)
        if not reads_logits and kwargs.get("labels") is None and kwargs.get("shift_labels") is None:
            return self._wrapped.original(**kwargs)
        labels, shifted, items = (kwargs.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch"))
        items = self.items if items is None else items
        as_dict = kwargs.get("return_dict")
        kwargs["return_dict"] = True
        self._follow(kwargs)
        if reads_logits:
            _, logits = self._read(kwargs, lambda head, features: [self._layout.logits(head(h)) for h in features])
            return logits[: len(self.taps)]
        shift, labels = self.shifts_labels and shifted is None, labels if shifted is None else shifted
        targets, count = targets_of(labels, self._layout.classes, shift=shift, items=items)
        weights = weights_of_depths(self.weights, len(self.taps), "weights of the handle")
        whole_logits = self.reads_tokens and not self.model.training
        exact: list[Tensor] = []

        def form(head: Callable[..., Tensor], features: list[Tensor]) -> tuple[LayerwiseLosses, Tensor | None]:
            losses, logits = self._losses(head, features, targets, weights)
            exact.append(losses.per_depth.detach())
            return losses, logits

        output, (losses, logits) = self._read(kwargs, form, whole_logits=whole_logits)
        # Of no items NaN, as in torch, but with gradients of zero.
        loss = losses.total / count.clamp(min=1) + 0 / count if items is None else losses.total / items
        from_routers = router_loss(self.model, output, self.router_factor)
        count = count.to(loss.device, non_blocking=True)
        self.measured = exact[0][: len(self.taps)] / count.clamp(min=1), count
        output = with_fields(
            output,
            loss=loss if from_routers is None else loss + from_routers.to(loss.device),
            logits=output.logits if whole_logits else logits,
            layer_losses=losses.per_depth[: len(self.taps)] / count.clamp(min=1),
            layer_loss_count=count,
        )
        as_dict = getattr(self.model.config, "return_dict", True) if as_dict is None else as_dict
        return output if as_dict else output.to_tuple()

    def _read(self, arguments: dict[str, Any], form: Form, *, whole_logits: bool = False, pool: bool = True) -> Any:
        """Return the model's output and what `form` makes of the depths; `pool`: as `inner_pooling` says."""
        run = functools.partial(self._wrapped.original, **arguments)
        mean = functools.partial(mean_of_tokens, mask=arguments.get("attention_mask"))
        pooled = mean if pool and self._pooling == "mean" else None
        return self._reader.read(run, form, whole_logits=whole_logits, pooled=pooled)

    def _losses(
        self, head: Callable[..., Tensor], features: list[Tensor], targets: Tensor, weights: Tensor | None = None
    ) -> tuple[LayerwiseLosses, Tensor | None]:
        """Return the losses, sums over the labels that count, and the logits of a classifier, from what the `head` is
        given at each of `taps`, and at the last depth. Without `weights` `[taps]` the total is the last depth's."""
        layout = self._layout
        for each in features:
            if each.shape[:-1] != targets.shape:
                raise InputError(
                    f"labels have shape {tuple(targets.shape)} but the head was given {tuple(each.shape[:-1])} "
                    + ("tokens: give one label a token, and no logits_to_keep" if layout.labels_tokens else "rows")
                )
        weight, bias = weight_and_bias(in_use(layout.head))
        rows = features if in_autocast(weight) else [each.to(weight.dtype) for each in features]
        if layout.scale != 1.0:
            rows = [each * layout.scale for each in rows]
            bias = None if bias is None else bias * layout.scale
        if weights is not None:  # the last depth may not be among those that are read
            weights = torch.cat([weights, weights.new_zeros(len(rows) - len(self.taps))])
        options: dict[str, Any] = {"depth_weights": weights, "ignore_index": IGNORED, "reduction": "sum"}
        total, per_depth = layerwise_cross_entropy(rows, weight, targets, bias, softcap=layout.softcap, **options)
        losses = LayerwiseLosses(per_depth[-1] if weights is None else total, per_depth)
        return losses, None if layout.reads_tokens else head(features[-1])

    def _follow(self, arguments: dict[str, Any]) -> None:
        """Find the modules anew, as they may have been replaced; after a change, and once, compare with the model."""
        if torch.compiler.is_compiling() and not _COMPILES:
            raise InputError(f"torch before 2.12 compiles no model with layer losses, and this is {torch.__version__}")
        layout = self._layout if torch.compiler.is_compiling() else find_layout(self.model)
        if len(layout.layers) != self.layers:
            raise InputError(
                f"this {type(self.model).__name__} had {self.layers} layers when its layer losses were attached, and "
                f"has {len(layout.layers)} now: call remove() before that, and attach after"
            )
        if layout is not self._layout and layout != self._layout:  # the first is all that a compiler follows
            self._layout = layout
        if self._checked is not self._layout:
            check_first_forward(self._layout, self.taps, self._wrapped, self._read_few, arguments)
            self._checked = self._layout

    def _read_few(self, layout: Layout, arguments: dict[str, Any], labels: Tensor, positions: Sequence[int]) -> Any:
        """Return the mean loss of the last depth, and the logits at some positions of `taps`; `layout` is read from now
        on."""
        self._reader.remove()
        self._reader = DepthReader(layout, self.taps)
        targets, count = targets_of(labels, self._layout.classes, shift=self.shifts_labels)

        def form(head: Callable[..., Tensor], features: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            losses, _ = self._losses(head, features, targets)
            logits = [self._layout.logits(head(features[position])) for position in positions]
            return losses.per_depth[-1] / count, logits

        return self._read(arguments, form, pool=False)[1]


def _check_taps(taps: Sequence[int] | None, layers: int) -> tuple[int, ...]:
    """Return the depths to read, counted from 0, the input of the first layer, to L, the output of the last."""
    try:
        depths = [range(layers + 1)[tap] for tap in (range(layers + 1) if taps is None else taps)]
    except (TypeError, IndexError):
        depths = []
    if not depths or any(first >= second for first, second in itertools.pairwise(depths)):
        expected = f"a list of increasing depths between 0 and {layers} (-1 is the last), or None for all"
        raise InputError(f"taps must be {expected}, got {taps!r}")
    return tuple(depths)
