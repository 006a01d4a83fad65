"""Compile every kernel for every card, here, without a GPU: `python -m cdt_fast.kernels.aot`.

With `--json FILE` a run that was cut off resumes where it was: what the file holds of the same source is not compiled
again. The exit status is 1 where something does not compile, asks for more shared memory than the card has, multiplies
without tensor cores, computes in double precision, or spills registers in bfloat16 or float16.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cdt_fast import files
from cdt_fast.kernels import cards
from cdt_fast.kernels.aot.case import PRECISIONS
from cdt_fast.kernels.aot.cases import FAMILIES
from cdt_fast.kernels.aot.compile import Configuration, Measurement, measure
from cdt_fast.kernels.aot.report import Row, as_csv, as_markdown, faults, from_json
from cdt_fast.kernels.cards import CARDS

# One of each two that take the same blocks: the machine code of an RTX 4090 is that of an RTX 3090 to the register, and
# of B200 and B300 likewise.
REPORTED = [name for name in CARDS if name not in ("RTX 4090", "B300")]
# Where bfloat16 is compiled too, these are compiled in it alone: their other dtypes take the blocks of an older card.
BFLOAT16_ALONE = ("B200", "RTX 5090")
PROCESSES = 2
SAVED_TOGETHER = 100  # configurations that a run which is cut off loses at most


def rows(
    families: Sequence[str], precisions: Sequence[str], cards: Sequence[str], without_divisibility: bool
) -> list[Row]:
    """Every configuration that the cases reach, not yet compiled: one row a case, launch and card.

    Flags do not meet alignment, nor the numbers: beside bfloat16 the cases that stand for a size are enough, and
    without divisibility bfloat16 is.
    """
    collected = []
    for family, precision, card in itertools.product(families, precisions, cards):
        for case in FAMILIES[family](PRECISIONS[precision].dtype):
            if precision != "bfloat16" and "bfloat16" in precisions and (not case.is_size or card in BFLOAT16_ALONE):
                continue
            for divisible in (True, False):
                if not divisible and not (without_divisibility and case.is_size and precision == "bfloat16"):
                    continue
                for launch in case.launches(PRECISIONS[precision], CARDS[card], divisible):
                    configuration = Configuration.of(launch, CARDS[card], divisible)
                    collected.append(Row(family, case.name, precision, card, case.aligned, divisible, configuration))
    return collected


def compiled(configurations: Sequence[Configuration], processes: int) -> Iterator[tuple[Configuration, Measurement]]:
    """Compile each once, in several processes; each as soon as it is there. What nobody waits for is not begun."""
    # Spawned: a fork would take over the threads that torch and LLVM have started here.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(measure, configuration): configuration for configuration in configurations}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 where a configuration has a fault."""
    parser = argparse.ArgumentParser(prog="python -m cdt_fast.kernels.aot", description=__doc__)
    parser.add_argument("--card", choices=CARDS, nargs="+", default=REPORTED, help="default: one of each kind")
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=list(FAMILIES), help="default: all")
    parser.add_argument("--precision", choices=PRECISIONS, nargs="+", default=list(PRECISIONS), help="default: all")
    parser.add_argument(
        "--without-divisibility",
        action="store_true",
        help="also compile the cases that stand for a size for pointers and sizes of any alignment, in bfloat16",
    )
    parser.add_argument("--processes", type=int, default=PROCESSES, help=f"default: {PROCESSES}")
    parser.add_argument(
        "--json", type=Path, help="write every figure to this file, and take from it what it holds of the same source"
    )
    parser.add_argument("--csv", type=Path, help="write a line a configuration to this file")
    parser.add_argument("--markdown", type=Path, help="write the summary to this file")
    options = parser.parse_args(arguments)
    if cards.interpreting():
        parser.error("TRITON_INTERPRET is set, and what the interpreter runs cannot be compiled: unset it")

    begin = time.perf_counter()
    all_rows = rows(options.family, options.precision, options.card, options.without_divisibility)
    configurations = list(dict.fromkeys(row.configuration for row in all_rows))
    records = files.read_json(options.json, dict[str, dict[str, Any]]) if options.json and options.json.exists() else {}
    measurements = from_json(records, configurations)
    missing = [configuration for configuration in configurations if configuration not in measurements]
    for count, (configuration, result) in enumerate(compiled(missing, options.processes), 1):
        measurements[configuration] = result
        what = f"{configuration.kernel} sm_{configuration.card.capability}"
        outcome = result.error or (
            f"{result.registers} registers, {result.local_bytes} bytes spilled, {result.shared_bytes} shared"
        )
        print(f"{count}/{len(missing)} {what}: {outcome}, {result.seconds:.1f} s", file=sys.stderr)
        if options.json and (count % SAVED_TOGETHER == 0 or count == len(missing)):
            files.write_json(options.json, {one.digest: asdict(found) for one, found in measurements.items()})
    print(
        f"{len(missing)} of {len(configurations)} configurations compiled in {time.perf_counter() - begin:.0f} s",
        file=sys.stderr,
    )
    measured = [replace(row, measured=measurements[row.configuration]) for row in all_rows]
    if options.csv:
        files.write_text(options.csv, as_csv(measured))
    if options.markdown:
        given = sys.argv[1:] if arguments is None else arguments
        command = shlex.join(("python", "-m", "cdt_fast.kernels.aot", *given))
        files.write_text(options.markdown, as_markdown(measured, command))
    broken = faults(measured)
    for line in broken:
        print(line)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
