"""What an exit of a network that denoises costs, counted from the shapes of its products."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch.utils.flop_counter import FlopCounterMode

from cdt_fast.models import DUST
from cdt_fast.video.networks import Denoiser, device_of, dtype_of, is_adaptive
from cdt_fast.video.overlap import tokens_of
from cdt_fast.video.settings import VideoSettings


@torch.no_grad()
def exit_flops(model: Denoiser, settings: VideoSettings, grids: int | None) -> list[float]:
    """FLOP a pixel of leaving after each depth 0..L, a multiplication and an addition being two.

    Args:
        model, settings: the model and the settings of its run.
        grids: as for `overlap.reconstructed`: the result is a mean over so many, and each is computed.
    """
    frames = torch.zeros(1, settings.data.window, *(settings.data.size,) * 2)
    tokens = tokens_of(frames.to(device_of(model), dtype_of(model)), settings)[:1]
    known: dict[str, Any] = {"deviation": 1.0} if is_adaptive(model) else {}

    def counted(sequences: int, depth: int) -> int:
        mapping = {torch.ops.cdt_fast.unrolled_layer: _of_layer, torch.ops.cdt_fast.symmetric_attention: _of_attention}
        counter = FlopCounterMode(display=False, custom_mapping=mapping)
        noisy = tokens.expand(sequences, -1, -1)
        with counter:
            if not settings.overlapping:
                model(noisy, depth=depth, **known)
            else:
                for level in range(1, depth + 1):
                    cast("DUST", model).refine(level, noisy, noisy, **known)
        return counter.get_total_flops()

    # Products of weights alone are the same for one sequence and for two: what a sequence adds is what it costs.
    pixels = tokens.numel() / len(settings.grid_places(grids))
    return [(counted(2, depth) - counted(1, depth)) / pixels for depth in range(model.layers + 1)]


def _of_layer(
    codes: Any, signal: Any, dictionary: Any, projection: Any, next_dictionary: Any, *_: Any, **__: Any
) -> int:
    """Of `ops.unrolled_layer`, by the shapes of its arguments: attention's scores and what they mix, and a product of
    every token with each dictionary that is read (docs/maths.md §7)."""
    sequences, times, pixels = signal
    atoms = dictionary[-1]
    read = (dictionary if next_dictionary is None else next_dictionary)[0] + pixels * (1 + (projection is None))
    mixed = pixels + (0 if codes is None else atoms)
    return 2 * sequences * times * (times * (pixels + mixed) + read * atoms)


def _of_attention(z: Any, values: Any, *_: Any, **__: Any) -> int:
    """Of `ops.symmetric_attention`: its scores and what they mix."""
    *sequences, times, width = z
    return 2 * math.prod(sequences) * times**2 * (width + (z if values is None else values)[-1])
