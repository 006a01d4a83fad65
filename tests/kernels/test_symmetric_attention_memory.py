"""The kernels of symmetric attention and what lies around: padding, other sequences' NaN, offsets beyond 2³¹."""

from __future__ import annotations

import dataclasses
import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cdt_fast.kernels import cards
from cdt_fast.kernels.blocks import Blocks
from cdt_fast.kernels.cards import CARDS, card_of
from cdt_fast.kernels.launch import Launch, recording
from cdt_fast.kernels.symmetric_attention_packed import packed_backward, packed_forward
from cdt_fast.kernels.symmetric_attention_streaming import row_dots, streaming_backward, streaming_forward
from tests.kernels.kernel_cases import (
    LENGTHS,
    NAMES,
    PACKED,
    RUNS,
    SOME,
    STREAMING,
    Inputs,
    Results,
    Shape,
    normal,
    same,
)


def tensors_of(inputs: Inputs) -> dict[str, Tensor]:
    named = {"z": inputs.z, "values": inputs.values, "grad_output": inputs.grad_output}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


@pytest.mark.parametrize(("poison", "energy"), [(float("nan"), False), (float("inf"), True)])
@pytest.mark.parametrize(("kernel", "shape"), SOME)
def test_whatever_stands_in_the_padding_reaches_nothing(
    kernel: str, shape: Shape, energy: bool, poison: float, device: torch.device
) -> None:
    inputs = Inputs.of(shape, device, torch.float32, lengths=LENGTHS, energy=energy)
    expected = RUNS[kernel](inputs)
    assert inputs.lengths is not None
    padding = torch.arange(shape.tokens, device=device) >= inputs.lengths.unsqueeze(-1)
    for tensor in tensors_of(inputs).values():
        tensor[padding] = poison
    for name, given, clean in zip(NAMES, RUNS[kernel](inputs), expected, strict=True):
        if given is not None and clean is not None:
            assert same(given, clean), name
            assert (given[padding] == (float("inf") if name == "log-sum-exp" else 0.0)).all(), name


# What cannot stay finite in the sequence itself, as indices of NAMES: all of its tokens see the poisoned one.
REACHED = {"z": (0, 1, 2, 3), "values": (0, 2), "grad_output": (2, 3)}


@pytest.mark.parametrize(("poison", "lengths"), [(float("nan"), None), (float("nan"), (7, 6, 7)), (float("inf"), None)])
@pytest.mark.parametrize("poisoned", REACHED)
@pytest.mark.parametrize(("kernel", "shape"), SOME)
def test_a_token_that_is_not_finite_stays_in_its_sequence_and_shows_there(
    kernel: str, shape: Shape, poisoned: str, lengths: Any, poison: float, device: torch.device
) -> None:
    # In a tile of `packed` the first two are together, and the third is alone.
    shape = shape._replace(sequences=3)
    inputs = Inputs.of(shape, device, torch.float32, lengths=lengths)
    if poisoned not in tensors_of(inputs):
        pytest.skip("the values are z")
    expected = RUNS[kernel](inputs)
    tensors_of(inputs)[poisoned][1, 3] = poison
    for index, (mine, clean) in enumerate(zip(RUNS[kernel](inputs), expected, strict=True)):
        if mine is None or clean is None:
            continue
        name = NAMES[index]
        assert same(mine[[0, 2]], clean[[0, 2]]), f"{name} of another sequence"
        if index not in REACHED[poisoned]:
            assert same(mine[1], clean[1]), name
            continue
        rows = mine[1][: None if lengths is None else lengths[1]]
        bad = ~torch.isfinite(rows.reshape(len(rows), -1)).all(-1)
        # An infinity as a score may weigh nothing elsewhere; a NaN is what comes of a NaN, in every row.
        assert bad.all() if poison != poison else bad.any(), name


def launches_of(kernel: str, inputs: Inputs) -> list[tuple[Launch, Results]]:
    """The forward and the backward, not launched, and what each would write."""
    found: list[tuple[Launch, Results]] = []
    with recording(card_of(inputs.z)) as launches:
        if kernel == "packed":
            written: Results = [*packed_forward(inputs.forward(), PACKED)]
            found.append((launches[-1], written))
            gradients = packed_backward(inputs.backward(*written), PACKED)
        else:
            written = [*streaming_forward(inputs.forward(), STREAMING)]
            found.append((launches[-1], written))
            gradients = streaming_backward(inputs.backward(*written), STREAMING)
        found.append((launches[-1], [*gradients]))
    return found


@pytest.mark.parametrize(
    ("kernel", "blocks", "own"),
    # One row of the first tile is idle; of the second block of a long sequence all but three.
    [("packed", 1, 15), ("streaming", 1, 16), ("streaming", 2, 19)],
)
def test_a_block_writes_its_own_rows_and_no_others(kernel: str, blocks: int, own: int, device: torch.device) -> None:
    # Two blocks that write the same row race on a GPU; one after the other the last is right, and hides it.
    tokens = 5 if kernel == "packed" else 19
    inputs = Inputs.of(Shape(4, tokens, 17), device, torch.float16)  # which keeps a remainder
    for launch, results in launches_of(kernel, inputs):
        dataclasses.replace(launch, grid=(blocks,)).run()
        for result in results:
            assert result is None or torch.isnan(result.reshape(4 * tokens, -1)[own:]).all()


def test_the_last_tile_writes_no_sequence_that_is_not_there(device: torch.device) -> None:
    inputs = Inputs.of(Shape(6, 5, 17), device, torch.float32)  # three a tile
    for launch, results in launches_of("packed", inputs):
        dataclasses.replace(launch, arguments={**launch.arguments, "sequences": 4}).run()
        for result in results:
            assert result is None or torch.isnan(result[4:]).all()


def test_row_dots_write_no_row_that_is_not_there(device: torch.device) -> None:
    with recording(CARDS["RTX 3090"]) as launches:
        output = row_dots(*(normal(seed, 384, 20).float().to(device) for seed in (1, 2)))
    dataclasses.replace(launches[0], arguments={**launches[0].arguments, "rows": 201}).run()
    assert torch.isnan(output[201:]).all()
    assert torch.isfinite(output[:201]).all()


# Offsets

TOKENS, WIDTH = 64, 256
SEQUENCES = 2**31 // (TOKENS * WIDTH) + 1


def run_last(launch: Launch, programs: int) -> None:
    """On a GPU all of the launch; in the interpreter, where that takes hours, its last blocks alone."""
    if not cards.interpreting():
        launch.run()
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    original = interpreter_builder.create_get_program_id
    for program in range(max(0, launch.grid[0] - programs), launch.grid[0]):
        interpreter_builder.create_get_program_id = lambda axis, program=program: TensorHandle(
            np.array([program if axis == 0 else 0], dtype=np.int32), tl.int32
        )
        dataclasses.replace(launch, grid=(1,)).run()
    interpreter_builder.create_get_program_id = original


def recorded(call: Any, *arguments: Any, **options: Any) -> Any:
    with recording(CARDS["RTX 3090"]) as launches:
        result = call(*arguments, **options)
    for launch in launches:
        run_last(launch, 8)
    return result


def large(values: Tensor) -> Tensor:
    """`[SEQUENCES, …]`: zeros, and `values` `[1, …]` as the last; on a CPU only what is written takes memory."""
    shape = SEQUENCES, *values.shape[1:]
    tensor = values.new_zeros(shape) if values.is_cuda else torch.from_numpy(np.zeros(shape, np.float16))
    tensor[-1:] = values
    return tensor


def attend_far_away(kernel: str, device: torch.device) -> None:
    z, values, upstream = (normal(seed, 1, TOKENS, WIDTH).to(device, torch.float16) / 4 for seed in range(3))
    far = [large(tensor) for tensor in (z, values, upstream)]
    lengths = torch.tensor([50], device=device)
    far_lengths = torch.full((SEQUENCES,), 50, device=device)
    near_inputs = Inputs(z, values, upstream, lengths, scale=0.5, energy=True)
    far_inputs = Inputs(*far, far_lengths, scale=0.5, energy=True)  # type: ignore[arg-type]
    sizes = {"packed": (64, 0, 64), "streaming": (16, 16, 0)}[kernel]
    blocks = Blocks(**dict(zip(("rows", "keys", "columns"), sizes, strict=True)), warps=4, stages=2)
    attend, differentiate = {
        "packed": (packed_forward, packed_backward),
        "streaming": (streaming_forward, streaming_backward),
    }[kernel]
    expected: Results = [*attend(near_inputs.forward(), blocks)]
    expected += differentiate(near_inputs.backward(*expected), blocks)
    given: Results = [*recorded(attend, far_inputs.forward(), blocks)]
    given += recorded(differentiate, far_inputs.backward(*given), blocks)
    for mine, near in zip(given, expected, strict=True):
        assert mine is not None
        assert near is not None
        assert torch.isfinite(near[:, :50]).all()
        assert same(mine[-1:], near)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", RUNS)
def test_offsets_of_more_than_31_bits(kernel: str, device: torch.device, emulated: bool) -> None:
    if emulated:
        pytest.skip("131,073 blocks of threads take hours")
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 38 * 2**30:
        pytest.skip("seven tensors of more than 2³¹ numbers take 30 GiB")
    # In a process of its own: a wrong offset ends it, and there fresh memory is not filled, so takes no room.
    process = multiprocessing.get_context("spawn").Process(target=attend_far_away, args=(kernel, device))
    process.start()
    process.join()
    assert process.exitcode == 0
