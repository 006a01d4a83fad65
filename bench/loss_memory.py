"""Peak memory of the losses of all depths and their gradients, over depths and vocabulary: fused, and eager loops.

    python -m cdt_fast.bench.loss_memory

Each figure is by how much the resident memory of a process of its own grows at the peak of one step (`bench.memory`):
hidden states `[N, d]` of all depths and a head `[V, d]` are there before; losses, their gradients, and whatever lies
between are not. The last column says how much of it is owed to depths and vocabulary together: of the four corners
M(most, most) − M(most, least) − M(least, most) + M(least, least).
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection

import torch

from cdt_fast.bench.baselines import eager_cross_entropy
from cdt_fast.bench.baselines.depths import a_depth_at_a_time, all_depths_then_backward
from cdt_fast.bench.case import Step
from cdt_fast.bench.memory import NotMeasured, resident_peak
from cdt_fast.bench.suites.cross_entropy import KNOWN, Shape, fused, make_inputs
from cdt_fast.tables import as_markdown
from cdt_fast.training.allocator import keep_freed_memory

DEPTHS = (2, 8, 16)
VOCABULARIES = (2048, 32768)
TOKENS, WIDTH = 256, 256
FUSED, LOOP, LOOP_OF_BACKWARDS = "cdt_fast", "eager loop over depths", "eager loop, a backward a depth"
WAYS = (FUSED, LOOP, LOOP_OF_BACKWARDS)


def step_of(way: str, depths: int, vocabulary: int) -> Step:
    """Losses and gradients in one way, on inputs of its own."""
    inputs = make_inputs(Shape("", depths, TOKENS, WIDTH, vocabulary), torch.float32, torch.device("cpu"))
    if way == FUSED:
        return fused(inputs, KNOWN)
    loop = all_depths_then_backward if way == LOOP else a_depth_at_a_time
    return loop(eager_cross_entropy.loss, inputs)


def in_a_process(way: str, depths: int, vocabulary: int) -> int:
    """The growth in bytes, measured in a process of its own: a copy of this one, which has computed nothing yet.

    Raises:
        NotMeasured: the process gave no figure; what went wrong is on stderr.
    """
    context = multiprocessing.get_context("fork")
    mine, others = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak, args=(others, way, depths, vocabulary))
    process.start()
    others.close()  # or the end of the process would not end the pipe
    try:
        return mine.recv()
    except EOFError as error:
        raise NotMeasured(
            f"{way}, {depths} depths, V {vocabulary}: the process that measures it gave nothing"
        ) from error
    finally:
        process.join()


def _send_peak(pipe: Connection, way: str, depths: int, vocabulary: int) -> None:
    pipe.send(resident_peak(step_of(way, depths, vocabulary)))


def together(peaks: dict[tuple[int, int], int]) -> int:
    """Bytes that are owed to depths and vocabulary together, of the peaks by `(depths, vocabulary)`."""
    few, many = min(peaks), max(peaks)
    return peaks[many] - peaks[many[0], few[1]] - peaks[few[0], many[1]] + peaks[few]


def main() -> None:
    """Print the table."""
    keep_freed_memory()
    grid = [(depths, vocabulary) for vocabulary in VOCABULARIES for depths in DEPTHS]
    rows = [["MiB", *(f"{depths} depths, V {vocabulary:,}" for depths, vocabulary in grid), "depths × V"]]
    for way in WAYS:
        peaks = {}
        for place in grid:
            peaks[place] = in_a_process(way, *place)
            print(f"{way}, {place[0]} depths, V {place[1]:,}: {peaks[place]:,} bytes", file=sys.stderr)
        rows.append([way, *(f"{peaks[place] / 2**20:,.1f}" for place in grid), f"{together(peaks) / 2**20:,.1f}"])
    logits = (max(DEPTHS) - min(DEPTHS)) * TOKENS * (max(VOCABULARIES) - min(VOCABULARIES)) * 4
    print(f"N {TOKENS}, d {WIDTH}, float32; torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print(as_markdown(rows))
    print(f"\nthe logits alone, depths × V: {logits / 2**20:,.1f}")


if __name__ == "__main__":
    main()
