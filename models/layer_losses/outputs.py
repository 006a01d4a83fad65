"""Labels as targets of the layerwise cross-entropy, and outputs of transformers that hold its losses too."""

from dataclasses import field, make_dataclass
from typing import Any

import torch
from torch import Tensor

from cdt_fast.checks import InputError
from cdt_fast.ops.common import describe

IGNORED = -100
FIELDS = ("layer_losses", "layer_loss_count")
_IGNORED_KEYS = "keys_to_ignore_at_inference"
# What models call the factor of the routers' loss in the loss that they return; JetMoe has the second.
_ROUTER_FACTORS = ("router_aux_loss_coef", "aux_loss_coef")
_KINDS: dict[type, type] = {}


def targets_of(labels: Any, classes: int, *, shift: bool, items: Any = None) -> tuple[Tensor, Tensor]:
    """Return labels, each a class or `IGNORED`, as int64 targets of their shape, and how many count, `[]`. With `shift`
    the target of a token is the label of the next one; `items` divides the losses in place of the count."""
    if not isinstance(labels, Tensor) or labels.dtype not in (torch.int64, torch.int32) or not labels.dim():
        raise InputError(f"labels must be an integer tensor, one class a row or a token, got {describe(labels)}")
    # Without a host sync, and without a break of a compiled graph.
    readable = labels.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and len(wrong := labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes))]):
        raise InputError(f"labels must be in [0, {classes}) or {IGNORED}, got {wrong[0].item()}")
    if shift:
        labels = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    count = (labels != IGNORED).sum()
    if readable and items is None and not count:
        which = "all of them, but for a sequence's first," if shift else "all of them"
        raise InputError(f"labels hold nothing to learn from: {which} are {IGNORED}")
    return labels.long().contiguous(), count


def router_loss(model: Any, output: Any, factor: float | None = None) -> Tensor | None:
    """Return what a mixture of experts adds to its loss, once a forward, so that tokens spread over them, or None.
    `factor` stands in the place of the model's own."""
    loss = output.get("aux_loss")
    if not isinstance(loss, Tensor):
        return None
    own = [getattr(model, name) for name in _ROUTER_FACTORS if hasattr(model, name)]
    factors = own if factor is None else [factor]
    if not factors:
        raise InputError(
            f"no layer losses for a {type(model).__name__} with a router loss: what it multiplies that by is unknown "
            f"(none of {', '.join(_ROUTER_FACTORS)}); set config.output_router_logits = False"
        )
    return factors[0] * loss


def with_fields(output: Any, **fields: Any) -> Any:
    """Return a copy of `output`, an instance of its class, that holds `fields` too; None leaves a field out."""
    kind = type(output)
    if kind not in _KINDS:
        # A class of its own: FSDP2 and DDP take outputs apart and rebuild them with the fields of their class alone.
        own = [(name, Any, field(default=None)) for name in FIELDS]
        _KINDS[kind] = make_dataclass(kind.__name__, own, bases=(kind,), namespace={"__module__": kind.__module__})
    return _KINDS[kind](**{**output, **fields})


def ignore_in_predictions(config: Any) -> None:
    """Keep a Trainer from gathering these fields in an evaluation as if they were predictions."""
    # It goes by a list of the configuration; its class's is extended, as its own would be written into config.json.
    holder = config if _IGNORED_KEYS in vars(config) else type(config)
    keys = getattr(holder, _IGNORED_KEYS, None) or ["past_key_values"]
    setattr(holder, _IGNORED_KEYS, [*keys, *(name for name in FIELDS if name not in keys)])
