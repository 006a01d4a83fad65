"""The options of the bench, shared by `cdt-fast bench` and `python -m cdt_fast.bench`."""

from __future__ import annotations

import argparse

from cdt_fast.bench.suites import SIZES, SUITES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser; `run.run_command` reads them."""
    parser.add_argument("--suite", nargs="+", choices=SUITES, metavar="NAME", help=f"{', '.join(SUITES)} (all)")
    parser.add_argument("--case", metavar="TEXT", help="only the cases whose name contains this (all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where to measure (cuda where there is a GPU)")
    parser.add_argument("--size", choices=SIZES, help="shapes: for a CPU, for a GPU, or tiny (as the device)")
    parser.add_argument("--repeats", type=int, metavar="N", help="timed rounds (as many as fit into some seconds)")
    parser.add_argument(
        "--out", default="benchmarks", metavar="DIR", help="folder of results files, to which runs add (benchmarks)"
    )
