"""A causal language model cut at an exit: the layers before it run at once, those behind it later, on kept states."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses.first_forward import excess_over_rounding, explained, without_dropout
from cdt_fast.models.layer_losses.heads import effective_linear, in_use
from cdt_fast.models.layer_losses.parts import ModelParts
from cdt_fast.models.layer_losses.patch import Patch, Segments


class SplitModel(Segments):
    """The two parts of a model, which share one cache.

    `shallow` runs the layers 0..exit−1 on new tokens and keeps their states; `deep` runs the others on all states that
    are kept, so that no layer runs twice on a token.

    Attributes:
        exit: the number of layers of the first part.
        rows: `[R]`, the tokens that the exit can name, in the order of its logits; None: all.
        kept: the number of tokens whose states are kept.
    """

    def __init__(self, parts: ModelParts, exit: int, rows: Tensor | None = None) -> None:
        super().__init__(parts.layers)
        self.exit = exit
        self.rows = rows
        self._parts = parts
        self._with_head = True
        self._head: tuple[Tensor, Tensor | None] | None = None

    @property
    def kept(self) -> int:
        return sum(state.shape[1] for state in self.states)

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """In this block the model's layers and head answer as the part that runs asks; afterwards as before."""
        if self.rows is not None:
            weight, bias = effective_linear(in_use(self._parts.head))
            self._head = weight[self.rows].detach(), None if bias is None else bias[self.rows].detach()
        try:
            with self.installed({self._parts.head: self._answer_of_head}):
                yield
        finally:
            self._head = None

    def shallow(self, inputs: dict[str, Any], *, head: bool = True) -> Tensor | None:
        """Run the first part on new tokens and keep their states.

        Args:
            inputs: of the model's forward.
            head: whether the exit's logits are read.

        Returns:
            `[B, tokens, V]`, or `[B, tokens, R]` with `rows`; None without `head`.
        """
        logits = self._run(range(self.exit), inputs, head).logits
        return logits if head else None

    def deep(self, inputs: dict[str, Any]) -> Any:
        """Run the second part on all kept states, which are then dropped.

        Args:
            inputs: of the model's forward, with the tokens of these states, and the cache `seen_from_behind`.

        Returns:
            The model's output.
        """
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = self.kept
        return self._run(range(self.exit, len(self._parts.layers)), inputs, True)

    def seen_from_behind(self, cache: Any) -> Any:
        """The cache as the second part has to see it: as long as its own layers are, for masks and positions are made
        from the first layers, which have seen the kept tokens already."""
        view = copy.copy(cache)
        behind = cache.layers[self.exit :]

        def stand_in(layer: Any) -> Any:
            kinds = (other for other in behind if getattr(other, "is_sliding", False) == layer.is_sliding)
            return next(kinds, behind[0])

        view.layers = [*map(stand_in, cache.layers[: self.exit]), *behind]
        return view

    def _run(self, due: range, inputs: dict[str, Any], head: bool) -> Any:
        self.due, self._with_head = due, head
        try:
            return self._parts.model(**inputs, return_dict=True)
        finally:
            self.due, self._with_head = None, True

    def _answer_of_head(self, patch: Patch, features: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The forward of the head."""
        if not self._with_head:
            return features
        if self._head is not None and self.due == range(self.exit):
            return F.linear(features, *self._head)
        return patch.original(features, *args, **kwargs)


def crop(cache: Any, tokens: int) -> None:
    """Remove the last `tokens` tokens from every layer of a cache; 0 is no idle call: windows are cut to their size."""
    for layer in cache.layers:
        if layer.is_croppable:
            layer.crop(-tokens)
        else:  # preallocated: what lies beyond its length is masked, and written over
            layer.cumulative_length.sub_(tokens)


def check_cache(model: Any, cache: Any) -> None:
    """Require a cache from which tokens can be removed.

    Raises:
        InputError: there is none, it or one of its layers keeps a state that cannot be taken back.
    """
    from transformers.cache_utils import (
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        EncoderDecoderCache,
        StaticCache,
        StaticLayer,
    )

    if cache is None:
        raise no_decoding(model, "it returned no cache: use_cache must be True, and the model must have one")
    # A model's own class may keep more than its layers do: that of MiniMax has the states of linear attention.
    if type(cache) not in (DynamicCache, StaticCache, EncoderDecoderCache):
        raise no_decoding(model, f"drafted tokens cannot be removed from its cache, a {type(cache).__name__}")
    known = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer)
    for number, layer in enumerate(cache.layers):
        if type(layer) not in known:
            raise no_decoding(
                model,
                f"the cache of its layer {number} is a {type(layer).__name__}, from which drafted tokens cannot be "
                "removed; expected a dynamic cache, or a static one without sliding windows",
            )


@torch.no_grad()
def check_split(parts: ModelParts, exit: int) -> None:
    """Require the two parts, run one after the other on a few tokens, to be the model.

    Raises:
        InputError: they are not: something between the layers is not known here.
    """
    model: Any = parts.model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(parts.classes, (1, 9), generator=generator).to(model.device)
    split = SplitModel(parts, exit)
    with without_dropout(model), explained(no_decoding, model, "its layers cannot be run in two parts"):
        own, cache = (model(input_ids=ids[:, :6], use_cache=True).get("past_key_values") for _ in range(2))
        check_cache(model, cache)
        expected = model(input_ids=ids[:, 6:], past_key_values=own, use_cache=True).logits
        with split.decoding():
            for number in range(6, 9):
                inputs = {"input_ids": ids[:, number : number + 1], "past_key_values": cache, "use_cache": True}
                split.shallow(inputs, head=False)
            inputs = {"input_ids": ids[:, 6:], "past_key_values": split.seen_from_behind(cache), "use_cache": True}
            logits = split.deep(inputs).logits
    excess = excess_over_rounding(logits, expected)
    if excess is not None:
        raise no_decoding(
            model,
            f"run in two parts, its logits differ by {excess[0]:.3g} from its own, where the largest is "
            f"{excess[1]:.3g}: it computes something between its layers that is not known here",
        )


def no_decoding(model: Any, reason: str) -> InputError:
    """The error for a model that does not decode with an exit."""
    return InputError(f"no decoding with an exit for a {type(model).__name__}: {reason}")
