"""An output of transformers: with more fields, and the loss of its routers."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

from torch import Tensor

from cdt_fast.errors import InputError

LAYER_LOSSES, LOSS_COUNT = "layer_losses", "layer_loss_count"
_FIELDS = (LAYER_LOSSES, LOSS_COUNT)

_IGNORED_KEYS = "keys_to_ignore_at_inference"

# What models call the factor of that loss in the loss that they return; JetMoe has the second.
_ROUTER_FACTORS = ("router_aux_loss_coef", "aux_loss_coef")
_KINDS: dict[type, type] = {}


def with_layer_losses(output: Any, **fields: Any) -> Any:
    """A copy of `output` that holds `fields` too, and stays an instance of its class; None leaves a field out."""
    kind = type(output)
    if kind not in _KINDS:
        _KINDS[kind] = _extended(kind)
    return _KINDS[kind](**{**output, **fields})


def ignore_in_predictions(config: Any) -> None:
    """Keep a Trainer from gathering these fields in an evaluation as if they were predictions.

    It goes by a list of its model's configuration. That of the class is extended, for good: one of the configuration
    itself would be written into its config.json, and names that no output has do nothing.
    """
    holder = config if _IGNORED_KEYS in vars(config) else type(config)
    keys = getattr(holder, _IGNORED_KEYS, None) or ["past_key_values"]
    setattr(holder, _IGNORED_KEYS, [*keys, *(name for name in _FIELDS if name not in keys)])


def with_router_loss(model: Any, loss: Tensor, output: Any) -> Tensor:
    """`loss` and what a mixture of experts adds to it so that tokens spread over the experts, `[]`.

    It is added once a forward, and not divided by a number of items: as in the models themselves.

    Raises:
        InputError: the model returns such a loss, but not under a name that is known what it is multiplied by.
    """
    of_router = output.get("aux_loss")
    if not isinstance(of_router, Tensor):
        return loss
    factors = [getattr(model, name) for name in _ROUTER_FACTORS if hasattr(model, name)]
    if not factors:
        raise InputError(
            f"no layer losses for a {type(model).__name__} with a router loss: what it multiplies that by is unknown "
            f"(none of {', '.join(_ROUTER_FACTORS)}); set config.output_router_logits = False"
        )
    return loss + (factors[0] * of_router).to(loss.device)


def _extended(kind: type) -> type:
    # A class of its own, as the nodes that torch knows (FSDP2 and DDP take outputs apart and put them together again)
    # have the fields of their class alone.
    fields = [(name, Any, field(default=None)) for name in _FIELDS]
    return make_dataclass(kind.__name__, fields, bases=(kind,), namespace={"__module__": kind.__module__})
