"""Peak memory of the losses of all depths and their gradients, over depths and vocabulary: fused, and eager loops.

    python -m cdt_fast.bench.loss_memory

Each figure is by how much the resident memory of a process of its own grows at the peak of one step (`bench.memory`):
hidden states `[N, d]` of all depths and a head `[V, d]` are there before; losses, their gradients, and whatever lies
between are not. The last column says how much of it is owed to depths and vocabulary together: of the four corners
M(most, most) − M(most, least) − M(least, most) + M(least, least).
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch

from cdt_fast.bench.baselines import eager_cross_entropy
from cdt_fast.bench.baselines.depths import a_depth_at_a_time, all_depths_then_backward
from cdt_fast.bench.case import Step
from cdt_fast.bench.memory import NotMeasured, resident_peak
from cdt_fast.bench.suites.cross_entropy import KNOWN, Shape, fused, make_inputs
from cdt_fast.tables import as_markdown
from cdt_fast.training.allocator import disable_malloc_trim

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
    """The growth in bytes, measured in a process of its own, which has computed nothing yet.

    Raises:
        NotMeasured: the process gave no figure; what went wrong is on stderr.
    """
    command = [sys.executable, "-m", "cdt_fast.bench.loss_memory", "--way", way]
    found = subprocess.run(
        [*command, "--depths", str(depths), "--vocabulary", str(vocabulary)], stdout=subprocess.PIPE, text=True
    )
    if found.returncode:
        raise NotMeasured(
            f"{way}, {depths} depths, V {vocabulary}: the process that measures it ended with status {found.returncode}"
        )
    return int(found.stdout)


def together(peaks: dict[tuple[int, int], int]) -> int:
    """Bytes that are owed to depths and vocabulary together, of the peaks by `(depths, vocabulary)`."""
    few, many = min(peaks), max(peaks)
    return peaks[many] - peaks[many[0], few[1]] - peaks[few[0], many[1]] + peaks[few]


def main() -> None:
    """Print the table, or in a process that measures one figure of it that figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--way", choices=WAYS, help="measure this way alone, in this process")
    parser.add_argument("--depths", type=int, default=DEPTHS[0], help=f"with --way: L+1 ({DEPTHS[0]})")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARIES[0], help=f"with --way: V ({VOCABULARIES[0]})")
    options = parser.parse_args()
    disable_malloc_trim()
    if options.way is None:
        _print_table()
    else:
        print(resident_peak(step_of(options.way, options.depths, options.vocabulary)))


def _print_table() -> None:
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
