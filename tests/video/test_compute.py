"""The FLOP of exits: those of the products that plain torch forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cdt_fast.models import DUST
from cdt_fast.ops.unrolled_layer import operator
from cdt_fast.video.figures import exit_flops
from cdt_fast.video.networks import build_network
from cdt_fast.video.settings import VideoSettings


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("readout", ["own", "next"])
def test_the_flop_of_a_layer_are_those_of_plain_torch(
    tiny_config: Callable[..., VideoSettings], monkeypatch: pytest.MonkeyPatch, tied: bool, readout: Any
) -> None:
    """The operator hides its products from the counter: what it computes is counted where it computes it."""
    settings = tiny_config(tied=tied, readout=readout)
    model = build_network(settings)
    found = exit_flops(model, settings, 1)
    counted, original = [], operator.forward_in_torch

    def product(_: Any, left: Any, right: Any, **__: Any) -> int:  # which torch does not count
        return 2 * math.prod(left) * right[-1]

    def forward(layer: Any) -> Any:
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: product}) as counter:
            result = original(layer)
        counted.append(counter.get_total_flops())
        return result

    monkeypatch.setattr(operator, "forward_in_torch", forward)
    tokens = torch.zeros(1, settings.data.window, settings.data.patch**2)
    with torch.no_grad():
        model(tokens)
    assert [after - before for before, after in pairwise(found)] == [flop / tokens.numel() for flop in counted]
    assert len(counted) == model.layers


def test_every_grid_counts(tiny_config: Callable[..., VideoSettings]) -> None:
    settings = tiny_config()
    model = DUST(settings.data.patch**2, 32, 2)
    one, four = (exit_flops(model, settings, grids) for grids in (1, 2))
    assert four == [4 * flop for flop in one]
    # Depth 0 is one product of the signal with a matrix of n x n.
    assert one[0] == 2 * settings.data.patch**2


def test_a_layer_that_starts_from_a_mean_costs_two_products() -> None:
    settings = VideoSettings()
    model = build_network(settings)
    # Of one token attention is a product of two vectors, and a vector of the result.
    layer = 2 * (2 * 512 * 512 + 2 * 512) / 512
    assert exit_flops(model, settings, None) == [8 * depth * layer for depth in range(model.layers + 1)]


def test_a_layer_that_starts_from_a_mean_has_attention_of_its_own_where_there_are_several_tokens() -> None:
    settings = VideoSettings()
    settings.data.patch_frames = settings.data.window // 2
    model = build_network(settings)
    assert isinstance(model, DUST)
    tokens, pixels, atoms = 2, model.patch_size, model.code_size
    # Attention twice: that of `refine`, and that of the layer.
    layer = 2 * (2 * tokens * pixels * atoms + 2 * tokens**2 * 2 * pixels) / (tokens * pixels)
    found = exit_flops(model, settings, None)
    assert found == [8 * depth * layer for depth in range(4)]
