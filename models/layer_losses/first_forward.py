"""Whether the losses of the depths are the model's own, asked once of the first forward that is given labels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses.parts import CLASSIFIER, ModelParts, unsupported
from cdt_fast.models.layer_losses.patch import Patch, patched, state_of
from cdt_fast.models.layer_losses.targets import IGNORED

_ROWS, _TOKENS = 2, 32
# Arguments of a language model that its reading does not depend on; without them a row may be cut.
_OF_POSITIONS = ("attention_mask", "position_ids", "token_type_ids", "cache_position")
_TF32_EPS = 2.0**-10


@dataclass
class Reading:
    """What a forward has read.

    Attributes:
        loss: `[]`, of the last depth, with that of the routers.
        dtype: what the head computes logits in, which the model may have turned into another since.
        features: of each inner depth that is tapped, what the head is given: `[B, T, d]`, of a classifier `[B, d]`.
        last: the same of the last depth, as the model's own forward computed it.
    """

    loss: Tensor
    dtype: torch.dtype
    features: Sequence[Tensor]
    last: Tensor


@torch.compiler.disable(
    reason="the first forward of a model with layer losses compares them with its own loss: call the model once with "
    "labels before it is compiled with fullgraph=True"
)
@torch.no_grad()
def check_first_forward(
    parts: ModelParts,
    taps: Sequence[int],
    patch: Patch,
    read: Callable[[Callable[[], Any], Tensor], Reading],
    arguments: dict[str, Any],
) -> None:
    """Require the last depth's loss to be the model's own, and inner depths to be the model without its last layers.

    A few rows and tokens of the batch are run without dropout and gradients, with labels of every kind; nothing of the
    model and of torch's random state is changed. Of each class of layers the first and the last depth before such a
    layer are compared.

    Args:
        patch: that of the model's forward; what is in its place by now may be another's.
        read: `(run, labels)` to what `run`, a forward without labels, reads of every depth.
        arguments: of the forward, without labels.

    Raises:
        InputError: they differ; it names the class of the model, both numbers, and where it can be told the reason.
    """
    arguments, labels = _few(parts, patch.names, arguments)
    run = functools.partial(patch.original, **arguments)
    with _without_dropout(parts.model):
        with _same_random_numbers(parts.model), _noted_states(parts.layers) as states:
            own = run(labels=labels)
        loss = own.get("loss", getattr(own, "loss", None))  # no key where transformers 4 is told it as an attribute
        if not isinstance(loss, Tensor) or loss.dim() or not isinstance(own.get("logits"), Tensor):
            raise unsupported(parts.model, "its forward with labels returns no loss and logits")
        _check_shapes(parts, states)
        with _explained(parts.model, "its inner depths cannot be read"):
            with _same_random_numbers(parts.model):
                reading = read(run, labels)
            for number in _compared(parts, taps):
                behind = dict.fromkeys(parts.layers[taps[number] :], _pass_on)
                with _same_random_numbers(parts.model), patched(behind):
                    last = read(run, labels).last
                _check_features(parts, taps[number], reading.features[number], last)
        _check_loss(parts, own["logits"].to(reading.dtype), loss, reading.loss, labels)


def _few(parts: ModelParts, taken: Sequence[str], arguments: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Arguments of a small forward, and its labels: all of different classes, one of a language model's ignored."""
    model: Any = parts.model
    # A cache would keep what these forwards add to it.
    arguments = {name: value for name, value in arguments.items() if name not in ("past_key_values", "use_cache")}
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
            name, arguments["inputs_embeds"] = "inputs_embeds", _drawn_as(embedding.weight, arguments.pop("input_ids"))
    tensors = {other: value for other, value in arguments.items() if isinstance(value, Tensor)}
    rows, device = len(tensors[name]), tensors[name].device
    if parts.kind == CLASSIFIER:
        if all(value.dim() and len(value) == rows for value in tensors.values()):
            arguments.update({other: value[: 2 * _ROWS] for other, value in tensors.items()})
            rows = min(rows, 2 * _ROWS)
        return arguments, torch.arange(rows, device=device).remainder(parts.classes)
    if "use_cache" in taken:
        arguments["use_cache"] = False
    tokens = tensors[name]
    if not set(tensors) - {name, *_OF_POSITIONS}:
        tokens = tokens[:_ROWS, :_TOKENS]
        tokens = tokens.repeat_interleave(2, 1) if tokens.shape[1] == 1 else tokens
        arguments = {other: value for other, value in arguments.items() if other not in _OF_POSITIONS}
        arguments[name] = tokens
    batch, length = tokens.shape[:2]
    labels = torch.arange(batch * length, device=device).mul(7919).remainder(parts.classes).view(batch, length)
    if length > 2:
        labels[0, length // 2] = IGNORED
    return arguments, labels


def _drawn_as(table: Tensor, ids: Tensor) -> Tensor:
    """Embeddings `[B, T, d]` for `ids`, whichever."""
    generator = torch.Generator().manual_seed(0)
    return 0.1 * torch.randn(*ids.shape, table.shape[-1], generator=generator).to(ids.device, table.dtype)


def _check_shapes(parts: ModelParts, states: dict[int, Any]) -> None:
    """Require one shape of all states: only then do the layers refine one, and can a head read any of them."""
    layers = len(parts.layers)
    if len(states) <= layers:
        raise unsupported(parts.model, f"no more than {len(states)} of its {layers} layers run in its forward")
    shapes = [tuple(getattr(states[depth], "shape", ())) for depth in range(layers + 1)]
    for depth, shape in enumerate(shapes):
        if shape != shapes[-1] or not shape:
            raise unsupported(
                parts.model,
                f"its layers do not refine one state: at depth {depth} it has the shape {shape}, at the last "
                f"{shapes[-1]}",
            )


def _check_loss(parts: ModelParts, logits: Tensor, loss: Tensor, read: Tensor, labels: Tensor) -> None:
    expected, given = loss.double().item(), read.double().item()
    # That of rounding the logits, and that of a sum of such losses.
    size = 1.0 + abs(expected)
    rounding = max(_rounding_of(loss), _rounding_of(read))
    tolerance = 2 * _rounding_of(logits) * logits.double().abs().max().item() + 16 * size * rounding
    # Not (a > b) rather than a <= b: where a model diverged, NaN is not the fault of its structure.
    if abs(given - expected) > tolerance:
        shift = ", each shifted by one token," if parts.shifts_labels else ""
        raise unsupported(
            parts.model,
            f"its own loss of a few tokens is {expected:.6g}, and {given:.6g} is read from its last depth. It computes "
            f"something between its last layer and its loss that is not known here, or its loss is no cross-entropy of "
            f"the labels{shift} and its logits alone, so that its inner depths cannot be read as its last one is",
        )


def _check_features(parts: ModelParts, depth: int, read: Tensor, expected: Tensor) -> None:
    layers = len(parts.layers)
    if read.shape == expected.shape:
        size = expected.double().abs().max().item()
        # Some models scale what the head is given in place of the logits.
        difference = min((factor * read - expected).double().abs().max().item() for factor in (1.0, parts.scale))
        if not difference > 16 * _rounding_of(expected) * size:
            return
        what = f"differ by {difference:.3g} where the largest is {size:.3g}"
    else:
        what = f"have the shapes {tuple(read.shape)} and {tuple(expected.shape)}"
    raise unsupported(
        parts.model,
        f"what its head is given from depth {depth}, and what it is given without the last {layers - depth} of its "
        f"{layers} layers, {what}. It computes something between its last layer and its head that is not known here",
    )


def _rounding_of(tensor: Tensor) -> float:
    """The spacing of what products of this dtype are rounded to."""
    if tensor.dtype == torch.float64:
        return torch.finfo(torch.float32).eps  # transformers computes its losses in float32
    eps = torch.finfo(tensor.dtype).eps
    return max(eps, _TF32_EPS) if tensor.is_cuda else eps


@contextlib.contextmanager
def _explained(model: nn.Module, what: str) -> Iterator[None]:
    """Whatever the model's code raises in this block becomes the error for `model` that says `what` and why."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # any: the code is not ours
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise unsupported(model, f"{what} ({reason})") from error


def _compared(parts: ModelParts, taps: Sequence[int]) -> list[int]:
    """The numbers of the first and the last tap before a layer of each class: what mixes depths shows at the last."""
    inner = [number for number, depth in enumerate(taps) if depth < len(parts.layers)]
    first = {type(parts.layers[taps[number]]): number for number in reversed(inner)}
    last = {type(parts.layers[taps[number]]): number for number in inner}
    return sorted({*first.values(), *last.values()})


@contextlib.contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, set one by one as `eval()` of some adapters merges them; the problem type stays as it is."""
    training = [module for module in model.modules() if module.training]
    config: Any = model.config
    settings = {name: vars(config)[name] for name in ("problem_type",) if name in vars(config)}
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
        vars(config).update(settings)


def _same_random_numbers(model: nn.Module) -> Any:
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    return torch.random.fork_rng(sorted(device.index for device in devices))


@contextlib.contextmanager
def _noted_states(layers: Sequence[nn.Module]) -> Iterator[dict[int, Any]]:
    """By depth, what each layer is given, and what the last one answers."""
    states: dict[int, Any] = {}

    def note(depth: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        states[depth] = state_of(args, kwargs)
        if depth == len(layers) - 1:
            states[len(layers)] = output[0] if isinstance(output, tuple | list) else output

    handles = [
        layer.register_forward_hook(functools.partial(note, depth), with_kwargs=True)
        for depth, layer in enumerate(layers)
    ]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _pass_on(patch: Patch, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer that answers with the state it is given."""
    state, output = state_of(args, kwargs), patch.original(*args, **kwargs)
    return type(output)((state, *output[1:])) if isinstance(output, tuple | list) else state
