"""One forward of a model, and what its head is given at each depth.

Nothing of the model is written anew. Hooks note the inputs of its layers while its own forward runs (the input of layer
l+1 is the output of layer l, and unlike an output it carries its gradient under reentrant checkpointing too). What lies
between a state and the head is then applied again, for each depth: of a language model its final norm; of a classifier
its whole forward, in which the base model answers with the noted state (pooling, dropout, dense layers).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError
from cdt_fast.models.layer_losses.layout import Layout, unsupported
from cdt_fast.models.layer_losses.wrapping import replaced_forward
from cdt_fast.ops.common import in_autocast

# What is made of the head: its forward, and its inputs at each of the depths that are read and, in any case, the last.
Form = Callable[[Callable[..., Tensor], list[Tensor]], Any]
_Autocast = tuple[str, torch.dtype] | None
_Run = Callable[[], Any]
_Pooled = Callable[[Tensor], Tensor] | None


class DepthReader:
    """Reads the depths `taps` of a model; its hooks are on the layers until `remove`."""

    def __init__(self, layout: Layout, taps: Sequence[int]) -> None:
        self.layout, self.last = layout, len(layout.layers)
        self._inner, self._kept = [depth for depth in taps if depth < self.last], {*taps, self.last}
        self._states: dict[int, Any] | None = None
        # A layer that stands at several depths has one hook: its calls are counted, also of those that are not read.
        noted: dict[nn.Module, list[int]] = {layout.layers[depth]: [] for depth in self._inner}
        for depth, layer in enumerate(layout.layers):
            noted.get(layer, []).append(depth)
        self._noted = sorted(depth for depths in noted.values() for depth in depths)
        if layout.reads_tokens and layout.tail:
            noted[layout.tail[0]] = [self.last]
        self._handles = [
            module.register_forward_pre_hook(functools.partial(self._note, depths), with_kwargs=True)
            for module, depths in noted.items()
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _note(self, depths: list[int], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A checkpointed layer runs again in the backward, unnoted; of the final norm the last call is the head's.
        if (states := self._states) is None:
            return
        for depth in depths:
            if depth == self.last or depth not in states:
                states[depth] = state_of(args, kwargs) if depth in self._kept else None
                break

    def read(self, run: _Run, form: Form, *, whole_logits: bool = False, pooled: _Pooled = None) -> tuple[Any, Any]:
        """Return the output of `run`, a forward of the model without labels (of a language model with the logits of one
        token, unless `whole_logits`), and what `form` makes of the depths. `pooled` is applied to what a classifier's
        base model returns before the last."""
        self._states = {}
        try:
            if self.layout.reads_tokens:
                return self._read_tokens(run, form, self._states, whole_logits)
            return self._read_rows(run, form, self._states, pooled)
        finally:
            self._states = None

    def _read_tokens(self, run: _Run, form: Form, states: dict[int, Tensor], whole_logits: bool) -> tuple[Any, Any]:
        layout, head_forward = self.layout, self.layout.head.forward
        given: list[tuple[Tensor, _Autocast]] = []  # what the head is given in the forward, and its autocast

        def head(features: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            given.append((features, _autocast_of(features)))
            if whole_logits:
                return head_forward(features, *args, **kwargs)
            with without_gradients():  # the model may go on computing with them: a softcap, a scale
                return head_forward(features[:, :1], *args, **kwargs)

        def read_states(forward: Callable[..., Tensor], states: list[Tensor]) -> Any:
            features = [layout.features(state).to(given[0][0].dtype) for state in states]
            for each in features:
                if each.shape != given[0][0].shape:
                    shapes = f"{tuple(each.shape)} as read, {tuple(given[0][0].shape)} in its forward"
                    raise unsupported(layout.model, f"what its head is given has another shape: {shapes}")
            return form(forward, features)

        with replaced_forward(layout.head, head):
            output = run()
        if not given:
            raise unsupported(layout.model, "its head did not run")
        # The last norm runs again inside of the head's call: sharded together with it, its weight is only there then.
        last = states.get(self.last, given[0][0])
        return output, self._in_head(read_states, [*self._inner_states(states), last], given[0][1])

    def _read_rows(self, run: _Run, form: Form, states: dict[int, Tensor], pooled: _Pooled) -> tuple[Any, Any]:
        """Do as `read` for a classifier; in place of logits its output has the rows that its head is given."""
        layout, autocast, outputs = self.layout, [], []
        base_forward = layout.base.forward

        def head(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            autocast.append(_autocast_of(rows))
            return rows

        def base(*args: Any, **kwargs: Any) -> Any:
            outputs.append(base_forward(*args, **kwargs))
            return outputs[0]

        with replaced_forward(layout.head, head):
            with replaced_forward(layout.base, base):
                output = run()
            rows = []
            for state in self._inner_states(states):
                replayed = functools.partial(_with_state, layout, outputs[0], state, pooled)
                with replaced_forward(layout.base, lambda *args, replayed=replayed, **kwargs: replayed()):
                    rows.append(run().logits)
        if not autocast:
            raise unsupported(layout.model, "its head did not run")
        return output, self._in_head(form, [*rows, output.logits], autocast[0])

    def _inner_states(self, states: dict[int, Tensor]) -> list[Tensor]:
        for depth in self._noted:
            if depth not in states:
                raise InputError(
                    f"layer {depth + 1} did not run in this forward, or without its hooks, so that depth {depth} has "
                    "no state: leave the depth out of taps, or switch off what skips the layer (layerdrop, no images)"
                )
        for depth in self._inner:
            shape, other = (tuple(getattr(states[each], "shape", ())) for each in (depth, self._inner[0]))
            if shape != other or not shape:
                reason = f"its layers do not refine one state: it has the shape {other} at depth {self._inner[0]}"
                raise unsupported(self.layout.model, f"{reason}, and {shape} at depth {depth}")
        return [states[depth] for depth in self._inner]

    def _in_head(self, form: Form, given: list[Tensor], autocast: _Autocast) -> Any:
        """Return `form` of `given`, computed inside of a call of the head and in the autocast that it was called in."""
        # FSDP acts on calls of the head: it gathers the weight before, and reduces its gradient after.
        precision = torch.autocast(*autocast) if autocast else contextlib.nullcontext()
        forward = self.layout.head.forward
        with precision, replaced_forward(self.layout.head, lambda given: form(forward, given)):
            return self.layout.head(given)


def tail_of(layout: Layout, run: _Run) -> tuple[nn.Module, ...]:
    """Return the modules that `run`, a forward, applies to what the last layer returns: others of the tail's names
    stand before the layers, or are given pooled rows."""
    shape: list[Any] = [None]
    ran: list[nn.Module] = []

    def last_layer_ran(layer: nn.Module, args: Any, output: Any) -> None:
        shape[0] = getattr(output[0] if isinstance(output, tuple | list) else output, "shape", None)
        ran.clear()

    def runs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in ran and getattr(state_of(args, kwargs), "shape", ()) == shape[0]:
            ran.append(module)

    with contextlib.ExitStack() as hooks:
        hooks.callback(layout.layers[-1].register_forward_hook(last_layer_ran).remove)
        for module in layout.tail:
            hooks.callback(module.register_forward_pre_hook(runs, with_kwargs=True).remove)
        run()
    return tuple(ran)


def _autocast_of(tensor: Tensor) -> _Autocast:
    return (tensor.device.type, torch.get_autocast_dtype(tensor.device.type)) if in_autocast(tensor) else None


def _with_state(layout: Layout, output: Any, state: Tensor, pooled: _Pooled) -> Any:
    """Return what the base model returned, with another last state."""
    state = layout.features(state)
    if len(state) != (rows := len(output["last_hidden_state"])):
        raise unsupported(layout.model, f"its layers are given {len(state)} rows of tokens where it returns {rows}")
    state = state if pooled is None else pooled(state)
    changed: dict[str, Tensor | None] = {"last_hidden_state": state}
    if "pooler_output" in output:
        pooler: Any = getattr(layout.base, "pooler", None)
        # Where that is no module of its own, no head needs it.
        changed["pooler_output"] = pooler(state) if isinstance(pooler, nn.Module) else None
    return type(output)(**{**output, **changed})


@contextlib.contextmanager
def without_gradients() -> Iterator[None]:
    """Record no gradients in this block, and leave none of autocast's casts of weights behind: torch 2.9 takes these
    for the rest of its block, and so finds no gradients of the weights."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def state_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the state that a layer is given, its first argument."""
    return args[0] if args else next(iter(kwargs.values()))


def mean_of_tokens(state: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of `state` `[B, T, d]` over its tokens (of `mask` `[B, T]`) in the place of each."""
    if mask is None:
        return state.mean(1, keepdim=True).expand_as(state)
    if mask.shape != state.shape[:2]:
        lengths = f"{mask.shape[1]} tokens to {state.shape[1]}"
        raise InputError(f"inner_pooling must be 'own' for a model that itself pads its rows, here from {lengths}")
    counted = mask.to(state.dtype).unsqueeze(-1)
    return ((state * counted).sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)).expand_as(state)
