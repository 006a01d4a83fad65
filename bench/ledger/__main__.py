"""Count every launch of a training step and of inference without a GPU, and predict its time from bytes and FLOP.

python -m cdt_fast.bench.ledger                                     # the table of all cards
python -m cdt_fast.bench.ledger --json FILE --markdown FILE         # the rows; the document
python -m cdt_fast.bench.ledger --work "DUST, training" --kernels H100        # what it consists of, by kernel
python -m cdt_fast.bench.ledger --host                              # the host's time for a step, without the launches
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cdt_fast import files
from cdt_fast.bench.ledger.recording import Entry, record
from cdt_fast.bench.ledger.rows import LAUNCH_SECONDS, PROFILES, executed, rows_of, seconds
from cdt_fast.bench.ledger.works import Work, works
from cdt_fast.bench.suites.trained import VideoWork
from cdt_fast.bench.suites.training_step import TrainingStep, fused
from cdt_fast.kernels import cards
from cdt_fast.kernels.launch import Launch
from cdt_fast.tables import as_markdown, as_text

Row = Mapping[str, Any]  # of `rows.rows_of`

# Products of these sizes take no time beside the calls that lead to them.
TOY = VideoWork("DUST", sequences=2, window=4, patch=16, code=16)
STEPS, ROUNDS = 20, 15

_TEXT = """# The ledger: what a step launches, and the time that it predicts

Made by `python -m cdt_fast.bench.ledger --markdown docs/ledger.md` (a part of `make kernels-report`), without a GPU: do
not edit. Each work is run on tensors that have shapes and no memory, in bfloat16 with float32 master weights, and every
kernel that it would launch is noted: ours, cuBLAS's, torch's. Nothing of this was timed; a measurement wins.

A cell is the predicted time in milliseconds, and in parentheses the floor's share of it. A launch takes the longer of
its bytes at the card's copy rate and its FLOP at the card's product rate; those of ours count whole tiles, what
several warps compute alike, and the last wave of blocks, which is not full. Launched one by one a step takes at least
{host:.0f} µs of the host for each; captured in a CUDA graph nothing. The floor is that of the benchmarks: in training
each layer's tensors read and written once, in inference the network's input and output.

Three simplifications show at 8,000 tokens: bytes that are found in the L2 cache count as if they came from memory
(which makes the prediction too high on cards with a large one), the few microseconds that even an empty kernel takes do
not count (which makes it too low), nor does it that a block of the unrolled layer may have one sequence more to move
than another (also too low).

{table}

## What bounds a step of DUST

Goals: 60 % of the floor at 64,000 tokens, 50 % at 8,000 captured, at most 60 launches of a launched step. M stands for
a tensor of codes (131 MB at 64,000 tokens), N for one of signals (33 MB).

- A layer moves 2 M + 4 N forward, 5 M + 8 N backward, and 2 M + 2 N in two library products for the dictionary: the
  gradient of the update is written for them and read again, as its sum over all tokens, 1 MB in float32, fits no
  multiprocessor. Before and after the layers stand casts and, captured, copies of the inputs, 0.4 GB.
- The first layer has no codes: H = (1/c) X D is linear in the signal, and the kernels take X − Z in its place.
- Where the share at 8,000 tokens is below 50 %, the tiles bound it: 400 sequences of 20 tokens on 128 multiprocessors
  are two tiles of 64 rows for most, 16,384 rows computed for 8,000, and on an H200 the products of half-filled tiles
  take longer than their bytes.
- Tried, and given up: a persistent grid, a loop over tiles in each block. The compiler keeps what is the same for all
  tiles in registers, and 8 to 450 bytes a thread spill, also with the motion of invariants switched off. In its place
  the sequences are shared out over whole waves of blocks.
- Products that several warps compute alike were to be at most 1.3 times those needed in every default, and are up to
  1.5 in 16 bits (attention up to 64 tokens, the layer with wide signals), 1.75 in the backward of attention 129 to 256
  wide on consumer cards (docs/kernels.md, ×). Tried on the compiler: four warps in the place of eight spill; taller
  tiles, 128 rows, spill or do not fit; more atoms or keys at a time do not fit. The layer's are counted in the shares
  above.
- Launches of a launched step: ten of the layers, fifteen products and two of the optimizer; the multipliers take two,
  for their update and for the weights of the depths. The rest are the casts of inputs and dictionary (four), the sums
  of the layers' errors and what makes losses of them, autograd's sums, and the sums for the log. A captured step is one
  launch. The host's own time for a launched step, with its launches stubbed out, was to fall to a third and fell to
  three quarters: `python -m cdt_fast.bench.ledger --host`, 1.9 ms of a processor where it was 2.5. What is left is
  spread over the checks, records and autograd of five layers, none of which is a tenth.
- Inference by one kernel for the whole network, which would keep the codes on chip and write reconstructions alone, is
  not built: on every card, at 8,000 and 64,000 tokens, the products of each layer take longer than its bytes (on an
  H100, where it is closest, 0.65 ms of products and 0.56 ms of bytes at 64,000), so that bytes saved are no time saved.
  A measurement that contradicts this opens the question again. All that is not a layer takes 3 to 8 % of the time,
  which is the most that such a kernel could save, were it free. What keeps the share below 100 % are tiles of 64 rows
  with 60 tokens, products among the rows of a tile that belong to other sequences, and the last wave; keeping the codes
  on chip changes none of them.

## What bounds a step of the denoiser

The default of `train video`: the mean over eight shifted grids of patches of 8 x 8 pixels and 8 frames, which every
layer starts from; a step of one crop of 64 x 64, and a window of 8 frames of 1088 x 1920.

- Its patches have 512 pixels, and a tile of the fused layer holds 256; each is a sequence of its own, whose attention
  is 1. So a layer is two products, the first with its threshold in one kernel, the second cuBLAS's. A kernel for both
  would not write the codes and read them again, half of the four tensors, and save no time: the two products of a patch
  take 6.6 ns on an RTX 4090 and their bytes 4.4, on an H200 1.3 and 0.95, on an H100 1.3 and 1.4.
- All grids of a crop go through a layer at once, what the layers need of the input is computed once, and gradients of
  the cuts are cuts: a step is 155 launches, where it was 1,218; captured one. Of its time two thirds are copies and
  sums that cut the grids out of frames and put them together again, and casts.

Launches, bytes and FLOP are those on an H100. What a work consists of, by kernel:
`python -m cdt_fast.bench.ledger --work "DUST, training" --kernels H100`.

## Rates

Measured on H100 and H200, else 97 % and 92 % of what the data sheets promise.

{rates}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m cdt_fast.bench.ledger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--markdown", type=Path, help="write the document to this file")
    parser.add_argument("--work", default="", help='a part of the name of the works to count, such as "DUST, training"')
    parser.add_argument("--kernels", choices=PROFILES, help="print the kernels of the works on this card instead")
    parser.add_argument("--host", action="store_true", help="time what the host does for a launched step of DUST")
    options = parser.parse_args(arguments)
    if options.host:
        print(f"{host_milliseconds():.2f} ms of a processor for a launched step of DUST, its launches stubbed out")
        return 0
    every = list(works())
    wanted = [work for work in every if options.work in work.name]
    if not wanted:
        names = dict.fromkeys(work.name for work in every)
        parser.error(f"--work: no work is named like {options.work!r}; there are {', '.join(names)}")
    if options.kernels:
        for work in wanted:
            print(_kernels_of(work, options.kernels))
        return 0
    rows = []
    for work in wanted:
        print(f"{work.name}, {work.tokens:,} tokens", file=sys.stderr)
        rows += rows_of(work)
    if options.json:
        files.write_json(options.json, rows)
    if options.markdown:
        files.write_text(options.markdown, document(rows))
    print(as_text(table(rows)))
    return 0


def table(rows: Sequence[Row]) -> list[list[str]]:
    """A line a work: its launches, bytes and FLOP on an H100, and on each card the prediction and its share."""
    lines = [["work", "tokens", "", "launches", "GB", "TFLOP", *PROFILES]]
    for (work, tokens, captured), group in itertools.groupby(rows, lambda r: (r["work"], r["tokens"], r["captured"])):
        cards = {row["card"]: row for row in group}
        shown = cards["H100"]
        lines.append(
            [
                work,
                f"{tokens:,}",
                "captured" if captured else "launched",
                str(shown["launches"]),
                f"{shown['bytes'] / 1e9:.2f}",
                f"{shown['flop'] / 1e12:.3f}",
                *(f"{row['predicted_ms']:.3g} ({row['share']:.0%})" for row in cards.values()),
            ]
        )
    return lines


def document(rows: Sequence[Row]) -> str:
    """The table in Markdown, with what it says and what it leaves out."""
    rates = [["card", "products, TFLOP/s", "copy, TB/s", "multiprocessors"]]
    rates += [
        [name, f"{card.product_rate / 1e12:.0f}", f"{card.copy_rate / 1e12:.2f}", str(card.spec.processors)]
        for name, card in PROFILES.items()
    ]
    text = _TEXT.format(host=LAUNCH_SECONDS * 1e6, table=as_markdown(table(rows)), rates=as_markdown(rates))
    return re.sub(r"(?<![\n|])\n *(?=[^\n| -])", " ", text)  # a paragraph a line


def _kernels_of(work: Work, name: str) -> str:
    """Launches, bytes, FLOP and milliseconds of each kernel, the slowest first."""
    card, found = PROFILES[name], defaultdict[str, list[Entry]](list)
    for entry in record(lambda: work.prepare(True), card.spec):
        found[entry.name].append(entry)
    spent = {kernel: 1e3 * sum(seconds(entry, card) for entry in some) for kernel, some in found.items()}
    lines = [["kernel", "launches", "GB", "GFLOP", "ms"]]
    for kernel in sorted(spent, key=spent.__getitem__, reverse=True):
        some = found[kernel]
        moved, flop = sum(entry.traffic for entry in some), sum(executed(entry, card) for entry in some)
        lines.append([kernel, str(len(some)), f"{moved / 1e9:.3f}", f"{flop / 1e9:.1f}", f"{spent[kernel]:.4f}"])
    return f"{work.name}, {work.tokens:,} tokens, {name}\n\n{as_text(lines)}\n"


@contextlib.contextmanager
def launches_stubbed_out() -> Iterator[None]:
    """Every op takes its kernels, which do nothing: what they would have written is whatever the memory held."""

    def nothing(*given: Any) -> None:
        return None

    there = {
        "unsupported_reason": nothing,
        "spec_of": lambda device: cards.CARDS["H200"],
        "interpreting": lambda: False,
    }
    with mock.patch.object(Launch, "run", nothing), mock.patch.multiple(cards, **there):
        yield


def host_milliseconds() -> float:
    """Of a constrained step of DUST under bfloat16 autocast, the fastest of several rounds: Python, torch's dispatcher
    and autograd on one thread; torch's own small operations run on the CPU, in the place of their launches."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with launches_stubbed_out():
            step = TrainingStep(TOY, fused, torch.device("cpu"), autocast=True)
            return 1e3 * min(_host_seconds(step) for _ in range(ROUNDS))
    finally:
        torch.set_num_threads(threads)


def _host_seconds(step: TrainingStep) -> float:
    begin = time.process_time()
    for _ in range(STEPS):
        step()
    return (time.process_time() - begin) / STEPS


if __name__ == "__main__":
    sys.exit(main())
