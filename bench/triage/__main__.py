"""`python -m cdt_fast.bench.triage`: start every stage, or be one."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cdt_fast.bench.machine import describe, file_stem
from cdt_fast.bench.run import chosen_device
from cdt_fast.bench.triage import report
from cdt_fast.bench.triage.run import DONE, Runner
from cdt_fast.bench.triage.stages import NAMES, PLAN, PROGRAMS, Context, Lines, run_here
from cdt_fast.errors import InputError

COMMAND = (sys.executable, "-m", "cdt_fast.bench.triage")


def main(arguments: Sequence[str] | None = None, command: Sequence[str] = COMMAND) -> int:
    """Run the command line.

    Args:
        arguments: in place of those of the process.
        command: starts this program again, for the stages.

    Returns:
        0 where every stage is done, else 1; 2 for bad input, which is one line on stderr.
    """
    parser = argparse.ArgumentParser(
        prog="python -m cdt_fast.bench.triage", description="The first ten minutes of a GPU.", allow_abbrev=False
    )
    folder = os.environ.get("OUT") or "bench/results"
    parser.add_argument("--out", default=folder, metavar="DIR", help="folder of the results ($OUT, or bench/results)")
    parser.add_argument("--stage", nargs="+", choices=NAMES, metavar="NAME", help=f"{', '.join(NAMES)} (all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: where kernels are emulated")
    parser.add_argument("--size", choices=("gpu", "toy"), default="gpu", help="shapes (gpu)")
    parser.add_argument("--patience", type=float, default=1.0, metavar="F", help="multiplies every limit (1)")
    # One stage in this process; these are given by the process that starts it.
    parser.add_argument("--here", choices=[*NAMES, *PROGRAMS], help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=math.inf, help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.here:
        try:
            name = describe(chosen_device(options.device), "as it comes")["name"]
        except InputError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 2
        own = "" if options.size == "gpu" else f"-{options.size}"
        options.file = Path(options.out) / f"{file_stem(name)}-triage{own}.jsonl"
        options.run = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M:%S}"
    lines = Lines(options.file, options.run)
    chosen = ["--device", options.device, "--size", options.size, "--file", str(lines.path), "--run", lines.run]
    command = [*command, *chosen]
    if options.here:
        context = Context(torch.device(options.device), options.size, lines, command, options.deadline)
        return run_here(options.here, context, options.skip)
    wanted = options.stage or NAMES
    plan = [[replace(one, limit=options.patience * one.limit) for one in row if one.name in wanted] for row in PLAN]
    ends = Runner(command, lines).run([row for row in plan if row])
    table = report.write_blocks(lines, lines.path.with_name(lines.path.name.replace("-triage", "-blocks")))
    print("\n".join(report.as_text(lines.read())))
    print(f"written to {', '.join(str(path) for path in (lines.path, table) if path)}")
    return 0 if all(end["status"] == DONE for end in ends) else 1


if __name__ == "__main__":
    sys.exit(main())
