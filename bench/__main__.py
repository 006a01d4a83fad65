"""`python -m cdt_fast.bench`: `cdt-fast bench` where the packages that the other commands need are missing."""

from __future__ import annotations

import argparse
import sys

from cdt_fast.bench.suites import SIZES, SUITES
from cdt_fast.checks import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, which `run.run_command` reads; those of `cdt-fast bench`, too."""
    parser.add_argument("--suite", nargs="+", choices=SUITES, metavar="NAME", help=f"{', '.join(SUITES)} (all)")
    parser.add_argument("--case", metavar="TEXT", help="only the cases whose name contains this (all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where to measure (cuda where there is a GPU)")
    parser.add_argument("--size", choices=SIZES, help="shapes of the cases: toy, or for a CPU or GPU (the device's)")
    parser.add_argument("--repeats", type=int, metavar="N", help="timed rounds of a case (5 to 25, some 8 seconds)")
    parser.add_argument("--quick", action="store_true", help="a few cases in about two minutes, and one table")
    out = "folder of the results files; a run adds to them (benchmarks; with --quick none)"
    parser.add_argument("--out", metavar="DIR", help=out)


def main() -> int:
    """Run the bench; bad input is one line on stderr and status 2, an interruption one and status 130."""
    from cdt_fast.bench.run import run_command  # with torch, which the help of `cdt-fast` does not wait for

    about = "Measure ops and training steps against other ways to do the same."
    parser = argparse.ArgumentParser(prog="python -m cdt_fast.bench", description=about, allow_abbrev=False)
    add_arguments(parser)
    options = parser.parse_args()
    try:
        return run_command(options)
    except InputError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted{getattr(options, 'hint', '')}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
