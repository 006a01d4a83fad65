"""The comparison of a model's first forward with the model itself, so that no wrong loss is silent."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError
from cdt_fast.models.layer_losses.layout import Layout, unsupported
from cdt_fast.models.layer_losses.outputs import IGNORED, router_loss, targets_of
from cdt_fast.models.layer_losses.reading import state_of, tail_of, without_gradients
from cdt_fast.models.layer_losses.wrapping import WrappedForward

_ROWS, _TOKENS = 4, 32
# Arguments of a language model that the reading of its depths does not depend on; without others a row may be cut.
_POSITIONAL = ("attention_mask", "position_ids", "token_type_ids", "cache_position")
_TF32_EPS = 2.0**-10


@torch.compiler.disable(
    reason="the first forward of a model with layer losses compares them with its own loss: call the model once with "
    "labels before it is compiled with fullgraph=True"
)
@without_gradients()
def check_first_forward(
    layout: Layout,
    taps: Sequence[int],
    wrapped: WrappedForward,
    read: Callable[[Layout, dict[str, Any], Tensor, Sequence[int]], tuple[Tensor, list[Tensor]]],
    arguments: dict[str, Any],
) -> None:
    """Require the logits at a depth to be the model's own when the layers after that depth hand their input on, and
    the loss at the last depth to be its own loss, of a few rows and tokens of the batch, without dropout.

    Compared are the last depth and, of each class of layers, the first and the last depth before such a layer: a model
    that mixes depths differs at the last. In training mode the loss is compared once more, with the logits of a forward
    in which the outermost module alone trains, where a term of training alone stands. `read` takes the layout with
    the tail that ran, arguments, labels and positions in `taps` (−1: the last depth, in any case), and returns the last
    depth's loss and the logits at the positions.
    """
    model, layers, training = layout.model, len(layout.layers), layout.model.training
    arguments, labels = _few(layout, wrapped.names, arguments)
    inner = [(type(layout.layers[depth]), position) for position, depth in enumerate(taps) if depth < layers]
    positions = [-1, *sorted({*dict(inner).values(), *dict(reversed(inner)).values()})]
    with _without_dropout(model):
        try:
            with _same_random_numbers(model):
                tail = tail_of(layout, lambda: wrapped.original(**arguments))
            with _same_random_numbers(model):
                loss, depths = read(dataclasses.replace(layout, tail=tail), arguments, labels, positions)
        except InputError:
            raise
        except Exception as error:  # any: the code is not ours
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise unsupported(model, f"its inner depths cannot be read ({reason})") from error
        for position, logits in zip(positions, depths, strict=True):
            depth = layers if position < 0 else taps[position]
            with _handed_on(layout.layers, depth), _same_random_numbers(model):
                own = wrapped.original(**arguments, labels=labels)
            _compare(layout, depth, logits, loss, own, labels)
        if not training:
            return
        model.training = True
        with _same_random_numbers(model):
            own = wrapped.original(**arguments, labels=labels)
        if isinstance(logits := own.get("logits"), Tensor):  # some leave them out in training
            _compare(layout, layers, logits, None, own, labels)  # these, as dropout there may change them


def _compare(layout: Layout, depth: int, logits: Tensor, loss: Tensor | None, output: Any, labels: Tensor) -> None:
    own, own_loss, layers = output.get("logits"), output.get("loss"), len(layout.layers)
    if not isinstance(own, Tensor) or not isinstance(own_loss, Tensor) or own_loss.dim():
        raise unsupported(layout.model, "its forward with labels returns no loss and logits")
    rounding, largest, problem = _rounding(logits), own.abs().max().item(), ""
    if own.shape != logits.shape:
        problem = f"have the shapes {tuple(logits.shape)} and {tuple(own.shape)}"
    # Where a model diverged, NaN is not the fault of its structure.
    elif (difference := (own - logits).abs().max().item()) > 4 * rounding * largest:
        problem = f"differ by {difference:.3g} where the largest is {largest:.3g}"
    if problem:
        without = f" without its last {layers - depth} of {layers} layers" if depth < layers else ""
        logits_differ = f"logits read from depth {depth} and its own{without} {problem}"
        unknown = "It computes something between its layers and its logits that is not known here"
        raise unsupported(layout.model, f"{logits_differ}. {unknown}")
    if depth < layers:
        return
    from_routers = router_loss(layout.model, output)
    expected = own_loss.item() - (0.0 if from_routers is None else from_routers.item())
    targets, _ = targets_of(labels, layout.classes, shift=layout.shifts_labels)
    # Of the model's own logits, in which no product is rounded anew: a small term is seen in any precision.
    rows = own.flatten(0, -2).to(own_loss.dtype)
    of_own = nn.functional.cross_entropy(rows, targets.flatten().to(rows.device), ignore_index=IGNORED)
    spacing = max(torch.finfo(rows.dtype).eps, 4 * torch.finfo(torch.float32).eps)
    cases = [(of_own.item(), 4 * (1 + abs(expected)) * spacing)]
    if loss is not None:
        spacing = max(_rounding(own_loss), _rounding(loss))
        cases.append((loss.item(), 2 * rounding * largest + 16 * (1 + abs(expected)) * spacing))
    for found, tolerance in cases:
        if abs(found - expected) > tolerance:
            shifted = ", each shifted by one token," if layout.shifts_labels else ""
            raise unsupported(
                layout.model,
                f"its own loss of a few tokens is {expected:.6g}, and the cross-entropy of its logits is {found:.6g}: "
                f"its loss is no cross-entropy of the labels{shifted} and its logits alone",
            )


def _rounding(tensor: Tensor) -> float:
    """Return the spacing of the numbers that products of this dtype are rounded to."""
    if tensor.dtype == torch.float64:
        return torch.finfo(torch.float32).eps  # transformers computes its losses in float32
    return max(torch.finfo(tensor.dtype).eps, _TF32_EPS if tensor.is_cuda else 0.0)


def _few(layout: Layout, names: Sequence[str], arguments: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Return arguments of a small forward, and labels of different classes, one of a language model's ignored."""
    model: Any = layout.model
    # A cache would keep what these forwards add to it.
    arguments = {name: value for name, value in arguments.items() if name not in ("past_key_values", "use_cache")}
    if layout.reads_tokens and "use_cache" in names:
        arguments["use_cache"] = False
    inputs = dict.fromkeys((getattr(model, "main_input_name", "input_ids"), "input_ids", "inputs_embeds"))
    name = next((name for name in inputs if isinstance(arguments.get(name), Tensor)), None)
    if name is None:
        raise unsupported(model, f"its forward is given none of {', '.join(inputs)}")
    if name == "input_ids" and "inputs_embeds" in names:
        embedding = None
        with contextlib.suppress(NotImplementedError):  # of models that do not say which theirs are
            embedding = model.get_input_embeddings()
        if embedding is not None and embedding._forward_hooks:
            # What a hook draws on the embeddings differs between these forwards, and is not theirs to draw.
            name, ids = "inputs_embeds", arguments.pop("input_ids")
            drawn = torch.randn(*ids.shape, embedding.weight.shape[-1], generator=torch.Generator().manual_seed(0))
            arguments[name] = (0.1 * drawn).to(ids.device, embedding.weight.dtype)
    tensors = {other: value for other, value in arguments.items() if isinstance(value, Tensor)}
    if layout.reads_tokens and not set(tensors) - {name, *_POSITIONAL}:
        tokens = tensors[name][: _ROWS // 2, :_TOKENS]
        arguments = {other: value for other, value in arguments.items() if other not in _POSITIONAL}
        arguments[name] = tokens.repeat_interleave(2, 1) if tokens.shape[1] == 1 else tokens
    elif all(value.dim() and len(value) == len(tensors[name]) for value in tensors.values()):
        arguments.update({other: value[:_ROWS] for other, value in tensors.items()})
    shape = arguments[name].shape[: 2 if layout.labels_tokens else 1]
    labels = torch.arange(shape.numel(), device=arguments[name].device).mul(7919).remainder(layout.classes).view(shape)
    if layout.labels_tokens and shape[1] > 2:
        labels[0, shape[1] // 2] = IGNORED
    return arguments, labels


@contextlib.contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode module by module, as `eval()` of some adapters merges them; keep the problem type."""
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
def _handed_on(layers: Sequence[nn.Module], depth: int) -> Iterator[None]:
    """Make the layers behind `depth` return the state that they are given, in this block, which is one forward."""
    # A layer that stands before the depth too runs that often first.
    before = collections.Counter(layers[:depth])

    def input_as_output(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        before[layer] -= 1
        if before[layer] >= 0:
            return output
        state = state_of(args, kwargs)
        return type(output)((state, *output[1:])) if isinstance(output, tuple | list) else state

    with contextlib.ExitStack() as hooks:
        for layer in dict.fromkeys(layers[depth:]):
            hooks.callback(layer.register_forward_hook(input_as_output, with_kwargs=True).remove)
        yield
