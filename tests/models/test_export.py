"""Models in torch.export, with batches and sequences of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cdt_fast import models

BATCH = torch.export.Dim("batch", min=2, max=4096)
LENGTH = torch.export.Dim("length", min=2, max=512)
WEIGHTS = [0.0, 0.5, 1.0]
VIT: dict[str, Any] = {"patch_size": 16, "grid": (2, 3), "layers": 2, "width": 12, "heads": 3}


class Call(nn.Module):
    """A call of a model, or of its losses with weights."""

    def __init__(self, model: Any, weights: list[float] | None) -> None:
        super().__init__()
        self.model, self.weights = model, weights

    def forward(self, first: Tensor, second: Tensor) -> Any:
        if self.weights is not None:
            return tuple(self.model.layer_losses(first, second, self.weights))
        if isinstance(self.model, models.DenoisingDUST):
            return self.model.refinement(first)(2, second)
        return self.model(first)


def made(name: str) -> Any:
    if name == "DenoisingViT":
        pytest.importorskip("transformers")
        return models.DenoisingViT(**VIT)
    if name == "DenoisingDUST":
        return models.DenoisingDUST(patch=4, patch_frames=1, code_size=24, layers=2)
    return models.TextUT((11, 6), 3, 2) if name == "TextUT" else models.DUST(16, 24, 2, sparsity=0.05)


def inputs_of(name: str, batch: int) -> tuple[Tensor, Tensor]:
    if name == "TextUT":
        return torch.randint(11, (batch, 5)), torch.randint(3, (batch,))
    return torch.rand(batch, 6, 16), torch.rand(batch, 6, 16)


@pytest.mark.parametrize(
    ("name", "weights"),
    [("DenoisingDUST", None), *((name, w) for name in ("DUST", "TextUT", "DenoisingViT") for w in (None, WEIGHTS))],
)
def test_exports_with_a_batch_of_any_size(name: str, weights: list[float] | None) -> None:
    torch.manual_seed(0)
    network, shapes = Call(made(name), weights), ({0: BATCH}, {0: BATCH})
    exported = torch.export.export(network, inputs_of(name, 7), dynamic_shapes=shapes, strict=False).module()
    for batch in (7, 9):
        given = inputs_of(name, batch)
        torch.testing.assert_close(exported(*given), network(*given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["DUST", "TextUT"])
def test_exports_with_sequences_of_any_length(name: str) -> None:
    torch.manual_seed(0)
    network, (first, _) = made(name).requires_grad_(False), inputs_of(name, 3)
    exported = torch.export.export(network, (first,), dynamic_shapes=({1: LENGTH},)).module()
    longer = first.repeat_interleave(20, 1)  # beyond what is packed into a tile
    torch.testing.assert_close(exported(longer), network(longer), rtol=1e-4, atol=1e-5)
