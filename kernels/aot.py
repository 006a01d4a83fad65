"""Compile every kernel for every card, here, without a GPU: `python -m cdt_fast.kernels.aot`.

The exit status is 1 where something does not compile, asks for more shared memory than the card has, multiplies
without tensor cores, computes in double precision, or spills registers in bfloat16 or float16.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from cdt_fast import kernels
from cdt_fast.kernels.aot_case import PRECISIONS
from cdt_fast.kernels.aot_cases import FAMILIES
from cdt_fast.kernels.aot_compile import Configuration, Measurement, measure
from cdt_fast.kernels.aot_report import Row, as_json, as_markdown, faults
from cdt_fast.kernels.launch import CARDS

PROCESSES = 2


def rows(
    families: Sequence[str], precisions: Sequence[str], cards: Sequence[str], without_divisibility: bool
) -> list[Row]:
    """Every configuration that the cases reach, not yet compiled: one row a case, launch and card."""
    found = []
    for family, precision, card in itertools.product(families, precisions, cards):
        for case in FAMILIES[family](PRECISIONS[precision].dtype):
            for launch in case.launches(PRECISIONS[precision], CARDS[card]):
                configuration = Configuration.of(launch, CARDS[card])
                row = Row(family, case.name, precision, card, case.aligned, True, configuration)
                found.append(row)
                # Flags do not meet alignment: the cases that stand for a size are enough.
                if without_divisibility and case.flop is not None:
                    found.append(replace(row, divisible=False, configuration=configuration.without_divisibility()))
    return found


def compile_all(configurations: Sequence[Configuration], processes: int) -> dict[Configuration, Measurement]:
    """Compile each once, in several processes, and say on stderr how far it is."""
    measurements: dict[Configuration, Measurement] = {}
    # Spawned: a fork would take over the threads that torch and LLVM have started here.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(measure, configuration): configuration for configuration in configurations}
        for count, future in enumerate(as_completed(futures), 1):
            configuration = futures[future]
            result = measurements[configuration] = future.result()
            what = f"{configuration.kernel} sm_{configuration.card.capability}"
            outcome = result.error or (
                f"{result.registers} registers, {result.local_bytes} bytes spilled, {result.shared_bytes} shared"
            )
            print(f"{count}/{len(futures)} {what}: {outcome}, {result.seconds:.1f} s", file=sys.stderr)
    return measurements


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 where a configuration has a fault."""
    parser = argparse.ArgumentParser(prog="python -m cdt_fast.kernels.aot", description=__doc__)
    parser.add_argument("--card", choices=CARDS, nargs="+", default=list(CARDS), help="default: all")
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=list(FAMILIES), help="default: all")
    parser.add_argument("--precision", choices=PRECISIONS, nargs="+", default=list(PRECISIONS), help="default: all")
    parser.add_argument(
        "--without-divisibility",
        action="store_true",
        help="also compile the cases that stand for a size for pointers and sizes of any alignment",
    )
    parser.add_argument("--processes", type=int, default=PROCESSES, help=f"default: {PROCESSES}")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args(arguments)
    if kernels.interpreting():
        parser.error("TRITON_INTERPRET is set, and what the interpreter runs cannot be compiled: unset it")

    begin = time.perf_counter()
    found = rows(options.family, options.precision, options.card, options.without_divisibility)
    configurations = list(dict.fromkeys(row.configuration for row in found))
    measurements = compile_all(configurations, options.processes)
    print(f"{len(configurations)} configurations in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    if options.json:
        options.json.write_text(as_json(found, measurements))
    if options.markdown:
        given = sys.argv[1:] if arguments is None else arguments
        command = shlex.join(("python", "-m", "cdt_fast.kernels.aot", *given))
        options.markdown.write_text(as_markdown(found, measurements, command))
    broken = faults(found, measurements)
    for line in broken:
        print(line)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
