"""An output of transformers with two more fields."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

LOSS_SUMS, LOSS_COUNT = "layer_loss_sums", "layer_loss_count"

_KINDS: dict[type, type] = {}


def with_layer_losses(output: Any, **fields: Any) -> Any:
    """A copy of `output` that holds `fields` too, and stays an instance of its class; None leaves a field out."""
    kind = type(output)
    if kind not in _KINDS:
        _KINDS[kind] = _extended(kind)
    return _KINDS[kind](**{**output, **fields})


def _extended(kind: type) -> type:
    # A class of its own, as the nodes that torch knows (FSDP2 and DDP take outputs apart and put them together again)
    # have the fields of their class alone.
    fields = [(name, Any, field(default=None)) for name in (LOSS_SUMS, LOSS_COUNT)]
    return make_dataclass(kind.__name__, fields, bases=(kind,), namespace={"__module__": kind.__module__})
