"""Whether a language model's loss shifts the labels: asked of its own forward, without its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_TOKENS = 5


def shifts_labels(model: Any, head: nn.Module, classes: int) -> bool:
    """Whether the target of a token is the label of the next one, as in most models, or its own, as in Bart's decoder.

    The forward of the model's class runs on a copy whose parts are stand-ins: they return zeros, and the head returns
    logits that tell the two apart. No parameter is read, so that the model may be sharded or on the meta device.
    Where that forward asks for more than stand-ins can give, the answer is yes; the first forward with labels compares
    the losses.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, _TOKENS, classes, generator=generator)
    labels = torch.arange(_TOKENS).remainder(classes).unsqueeze(0)
    twin = object.__new__(type(model))  # not copy.copy: FSDP2's classes cannot be copied
    parts = {name: part and _StandIn(part, head, logits) for name, part in model._modules.items()}
    vars(twin).update({**vars(model), "_modules": parts})
    try:
        with torch.no_grad():
            output = type(model).forward(twin, input_ids=torch.zeros_like(labels), labels=labels, return_dict=True)
        loss, logits = output["loss"].float(), output["logits"].float()
    except Exception:  # any: the code is not ours
        return True
    own = nn.functional.cross_entropy(logits[0], labels[0])
    shifted = nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])
    return bool((loss - shifted).abs() <= (loss - own).abs())


class _StandIn:
    """In the place of a module, with its attributes and parts: answers with logits for the head, else with zeros."""

    def __init__(self, module: nn.Module, head: nn.Module, logits: Tensor) -> None:
        self._module, self._head, self._logits = module, head, logits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._logits if self._module is self._head else _Output((self._logits.new_zeros(1, _TOKENS, 1),))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _StandIn(value, self._head, self._logits) if isinstance(value, nn.Module) else value


class _Output(tuple[Tensor]):
    """Of a base model: states alone, under the names and the numbers by which a forward may ask for them."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
