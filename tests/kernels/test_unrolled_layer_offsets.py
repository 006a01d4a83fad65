"""Offsets of more than 31 bits in the kernels of the unrolled layer."""

from __future__ import annotations

import dataclasses
import multiprocessing

import pytest
import torch
from torch import Tensor

from cdt_fast.kernels.blocks import Blocks
from cdt_fast.kernels.cards import CARDS
from cdt_fast.kernels.launch import recording
from tests.kernels.kernel_cases import same
from tests.kernels.test_symmetric_attention_memory import SEQUENCES, TOKENS, WIDTH, large, run_last
from tests.kernels.unrolled_cases import Inputs, Shape, backward, backward_inputs, forward

BLOCKS = Blocks(rows=TOKENS, atoms=64, columns=64, warps=8, stages=1)


def far(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else large(tensor) if tensor.dim() == 3 else tensor


def far_away(device: torch.device) -> None:
    near = Inputs.of(Shape(1, TOKENS, WIDTH, WIDTH, WIDTH), device, torch.float16, lengths=(50,))
    following = backward_inputs(near)
    expected = forward(near, BLOCKS) | backward(near, *following, BLOCKS)
    moved = {name: far(tensor) for name, tensor in near.tokens().items()}
    distant = dataclasses.replace(near, **moved, lengths=torch.full((SEQUENCES,), 50, device=device))
    next_codes, next_projection = (large(tensor) for tensor in following)
    with recording(CARDS["RTX 3090"]) as launches:
        found = forward(distant, BLOCKS) | backward(distant, next_codes, next_projection, BLOCKS)
    for launch in launches:
        run_last(launch, 1)
    for name, mine in found.items():
        right = expected[name]
        assert mine is not None
        assert right is not None
        assert same(mine[-1:], right), name


def test_offsets_of_more_than_31_bits(device: torch.device, emulated: bool) -> None:
    if emulated:
        pytest.skip("131,073 blocks of threads take hours")
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 70 * 2**30:
        pytest.skip("fifteen tensors of more than 2³¹ numbers take 64 GiB")
    # In a process of its own: a wrong offset ends it, and there fresh memory is not filled, so takes no room.
    process = multiprocessing.get_context("spawn").Process(target=far_away, args=(device,))
    process.start()
    process.join()
    assert process.exitcode == 0
