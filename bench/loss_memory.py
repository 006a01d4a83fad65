"""Peak memory of the losses of all depths and their gradients, over depths and vocabulary: fused, and eager loops.

    python -m cdt_fast.bench.loss_memory

Each figure is by how much the resident memory of a process of its own grows at the peak of one step (`bench.memory`):
hidden states `[N, d]` of all depths and a head `[V, d]` are there before; losses, their gradients, and whatever lies
between are not. The last column says how much of it is owed to depths and vocabulary together: of the four corners
M(most, most) − M(most, least) − M(least, most) + M(least, least).
"""

from __future__ import annotations

import itertools
import sys

import torch

from cdt_fast.bench.baselines import cross_entropy as others
from cdt_fast.bench.case import Step
from cdt_fast.bench.memory import peak_in_a_process, report_peak
from cdt_fast.bench.suites.cross_entropy import KNOWN, Shape, fused, make_inputs
from cdt_fast.tables import as_markdown

DEPTHS = (2, 8, 16)
VOCABULARIES = (2048, 32768)
TOKENS, WIDTH = 256, 256
IMPLEMENTATIONS = {
    "cdt_fast": lambda inputs: fused(inputs, KNOWN),
    "eager loop over depths": lambda inputs: others.all_depths_then_backward(others.eager, inputs),
    "eager loop, a backward a depth": lambda inputs: others.a_depth_at_a_time(others.eager, inputs),
}


def step_of(name: str, depths: int, vocabulary: int) -> Step:
    """Losses and gradients by one of `IMPLEMENTATIONS`, on inputs of its own."""
    shape = Shape("", depths, TOKENS, WIDTH, vocabulary)
    return IMPLEMENTATIONS[name](make_inputs(shape, torch.float32, torch.device("cpu")))


def main() -> None:
    """Print the table."""
    grid = [(depths, vocabulary) for vocabulary, depths in itertools.product(VOCABULARIES, DEPTHS)]
    rows = [["MiB", *(f"{depths} depths, V {vocabulary:,}" for depths, vocabulary in grid), "depths × V"]]
    for name in IMPLEMENTATIONS:
        peaks = [peak_in_a_process("cdt_fast.bench.loss_memory", name, *map(str, place)) for place in grid]
        sizes = [float(peak) / 2**20 for peak in peaks]
        together = sizes[-1] - sizes[len(DEPTHS) - 1] - sizes[-len(DEPTHS)] + sizes[0]
        rows.append([name, *(f"{size:,.1f}" for size in [*sizes, together])])
    logits = (DEPTHS[-1] - DEPTHS[0]) * TOKENS * (VOCABULARIES[-1] - VOCABULARIES[0]) * 4
    print(f"N {TOKENS}, d {WIDTH}, float32; torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print(as_markdown(rows))
    print(f"\nthe logits alone, depths × V: {logits / 2**20:,.1f}")


if __name__ == "__main__":
    if len(sys.argv) == 4:  # one figure, in this process
        report_peak(lambda: step_of(sys.argv[1], *map(int, sys.argv[2:])))
    else:
        main()
