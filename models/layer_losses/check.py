"""Whether depths are read as the model reads its last, asked once of the first forward that is given labels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError
from cdt_fast.models.layer_losses.layout import Layout, unsupported
from cdt_fast.models.layer_losses.outputs import IGNORED, router_loss
from cdt_fast.models.layer_losses.wrapping import WrappedForward, state_of

_ROWS, _TOKENS = 4, 32
# Arguments of a language model that its reading does not depend on; without them a row may be cut.
_OF_POSITIONS = ("attention_mask", "position_ids", "token_type_ids", "cache_position")
_TF32_EPS = 2.0**-10


@torch.compiler.disable(
    reason="the first forward of a model with layer losses compares them with its own loss: call the model once with "
    "labels before it is compiled with fullgraph=True"
)
@torch.no_grad()
def check_first_forward(
    layout: Layout,
    taps: Sequence[int],
    wrapped: WrappedForward,
    read: Callable[..., tuple[Tensor, list[Tensor], torch.dtype]],
    arguments: dict[str, Any],
) -> None:
    """Require the logits of a depth to be the model's own where the layers behind that depth hand their input on, and
    the loss of the last depth to be its own loss.

    A few rows and tokens of the batch are run without dropout and gradients, with labels of every kind; nothing of the
    model and of torch's random state is changed. Compared are the last depth and, of each class of layers, the first
    and the last depth before such a layer: what mixes depths shows at the last.

    Args:
        wrapped: the model's forward.
        read: `(arguments, labels, positions)` to the loss that is read of the last depth, the logits of some of `taps`
            (−1 is the last depth whether it is among them or not), and the dtype that they are computed in.
        arguments: of the forward, without labels.

    Raises:
        InputError: they differ; it names the class of the model, both numbers, and where it can be told the reason.
    """
    arguments, labels = _few(layout, wrapped.names, arguments)
    layers = len(layout.layers)
    inner = [(type(layout.layers[depth]), position) for position, depth in enumerate(taps) if depth < layers]
    positions = [-1, *sorted({*dict(inner).values(), *dict(reversed(inner)).values()})]
    with _without_dropout(layout.model):
        try:
            with _same_random_numbers(layout.model):
                loss, depths, dtype = read(arguments, labels, positions)
        except InputError:
            raise
        except Exception as error:  # any: the code is not ours
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise unsupported(layout.model, f"its inner depths cannot be read ({reason})") from error
        for position, logits in zip(positions, depths, strict=True):
            depth = layers if position < 0 else taps[position]
            with _handed_on(layout.layers[depth:]), _same_random_numbers(layout.model):
                own = wrapped.original(**arguments, labels=labels)
            _compare_logits(layout, depth, logits, own.get("logits"), dtype)
            if position < 0:
                _compare_loss(layout, loss, own, dtype)


def _compare_logits(layout: Layout, depth: int, read: Tensor, own: Any, dtype: torch.dtype) -> None:
    layers = len(layout.layers)
    if not isinstance(own, Tensor):
        raise unsupported(layout.model, "its forward with labels returns no logits")
    if own.shape == read.shape:
        largest, difference = own.abs().max().item(), (own - read).abs().max().item()
        # Not (a > b) rather than a <= b: where a model diverged, NaN is not the fault of its structure.
        if not difference > 4 * _rounding(dtype, own.is_cuda) * largest:
            return
        what = f"differ by {difference:.3g} where the largest is {largest:.3g}"
    else:
        what = f"have the shapes {tuple(read.shape)} and {tuple(own.shape)}"
    without = f"its own without its last {layers - depth} of {layers} layers" if depth < layers else "its own"
    raise unsupported(
        layout.model,
        f"logits read from depth {depth} and {without} {what}. It computes something between its layers and its logits "
        "that is not known here",
    )


def _compare_loss(layout: Layout, read: Tensor, own: Any, dtype: torch.dtype) -> None:
    loss = getattr(own, "loss", None)
    if not isinstance(loss, Tensor) or loss.dim():
        raise unsupported(layout.model, "its forward with labels returns no loss")
    of_routers = router_loss(layout.model, own)
    expected, given = loss.item() - (0.0 if of_routers is None else of_routers.item()), read.item()
    # That of rounding the logits, and that of a sum of such losses.
    rounding = max(_rounding(loss.dtype, loss.is_cuda), _rounding(read.dtype, read.is_cuda))
    largest = own["logits"].abs().max().item()
    if abs(given - expected) > 2 * _rounding(dtype, loss.is_cuda) * largest + 16 * (1 + abs(expected)) * rounding:
        shifted = ", each shifted by one token," if layout.shifts_labels else ""
        raise unsupported(
            layout.model,
            f"its own loss of a few tokens is {expected:.6g}, and the cross-entropy of its logits is {given:.6g}: its "
            f"loss is no cross-entropy of the labels{shifted} and its logits alone",
        )


def _rounding(dtype: torch.dtype, on_gpu: bool) -> float:
    """The spacing of what products of this dtype are rounded to."""
    if dtype == torch.float64:
        return torch.finfo(torch.float32).eps  # transformers computes its losses in float32
    return max(torch.finfo(dtype).eps, _TF32_EPS if on_gpu else 0.0)


def _few(layout: Layout, taken: Sequence[str], arguments: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Arguments of a small forward, and its labels: all of different classes, one of a language model's ignored."""
    model: Any = layout.model
    # A cache would keep what these forwards add to it.
    arguments = {name: value for name, value in arguments.items() if name not in ("past_key_values", "use_cache")}
    if layout.reads_tokens and "use_cache" in taken:
        arguments["use_cache"] = False
    names = [getattr(model, "main_input_name", "input_ids"), "input_ids", "inputs_embeds"]
    name = next((name for name in names if isinstance(arguments.get(name), Tensor)), None)
    if name is None:
        raise unsupported(model, f"its forward is given none of {', '.join(dict.fromkeys(names))}")
    if name == "input_ids" and "inputs_embeds" in taken:
        embedding = None
        with contextlib.suppress(NotImplementedError):  # of models that do not say which theirs are
            embedding = model.get_input_embeddings()
        if embedding is not None and embedding._forward_hooks:
            # What someone draws on the embeddings is not the same in each of these forwards, and not to be drawn.
            name, ids = "inputs_embeds", arguments.pop("input_ids")
            drawn = torch.randn(*ids.shape, embedding.weight.shape[-1], generator=torch.Generator().manual_seed(0))
            arguments[name] = (0.1 * drawn).to(ids.device, embedding.weight.dtype)
    tensors = {other: value for other, value in arguments.items() if isinstance(value, Tensor)}
    if layout.reads_tokens and not set(tensors) - {name, *_OF_POSITIONS}:
        tokens = tensors[name][: _ROWS // 2, :_TOKENS]
        tokens = tokens.repeat_interleave(2, 1) if tokens.shape[1] == 1 else tokens
        arguments = {other: value for other, value in arguments.items() if other not in _OF_POSITIONS}
        arguments[name] = tokens
    elif all(value.dim() and len(value) == len(tensors[name]) for value in tensors.values()):
        arguments.update({other: value[:_ROWS] for other, value in tensors.items()})
    shape = arguments[name].shape[: 2 if layout.reads_tokens else 1]
    labels = torch.arange(shape.numel(), device=arguments[name].device).mul(7919).remainder(layout.classes).view(shape)
    if layout.reads_tokens and shape[1] > 2:
        labels[0, shape[1] // 2] = IGNORED
    return arguments, labels


@contextlib.contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, set one by one as `eval()` of some adapters merges them; the problem type stays as it is."""
    training = [module for module in model.modules() if module.training]
    settings: Any = vars(model.config)
    problem = {name: settings[name] for name in ("problem_type",) if name in settings}
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
        settings.update(problem)


def _same_random_numbers(model: nn.Module) -> Any:
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    return torch.random.fork_rng(sorted(device.index for device in devices))


@contextlib.contextmanager
def _handed_on(layers: Sequence[nn.Module]) -> Iterator[None]:
    """In this block these layers answer with the state that they are given."""

    def input_as_output(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        state = state_of(args, kwargs)
        return type(output)((state, *output[1:])) if isinstance(output, tuple | list) else state

    hooks = [layer.register_forward_hook(input_as_output, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
