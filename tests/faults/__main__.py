"""The command line of the faults."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import matplotlib.pyplot
import torch

from cdt_fast.files import read_json, write_json
from cdt_fast.training import evaluation, loop, report
from tests.faults.jobs import Problem
from tests.faults.kinds import KINDS
from tests.faults.workshop import Workshop

IMPORTED = (matplotlib.pyplot, evaluation, loop, report)  # here, that a forked command need not


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the next has the next")
    parser.add_argument("--trials", type=int, default=2**31, help="at most so many of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--json", type=Path, help="adds to the counts in this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts = read_json(options.json) if options.json is not None and options.json.exists() else {}
    names = options.kinds.split(",")
    until = time.monotonic() + 60 * options.minutes
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    shop = Workshop(folder)
    made = 0
    try:
        while time.monotonic() < until and made < options.trials * len(names):
            name, seed = names[made % len(names)], options.seed + made // len(names)
            made += 1
            of = counts.setdefault(name, {"trials": 0, "faults": 0, "problems": []})
            try:
                of["faults"] += KINDS[name](shop, random.Random(f"{name} {seed}"))
            except Problem as problem:
                of["problems"].append({"seed": seed, "problem": str(problem)})
                print(f"{name}, seed {seed}: {problem}", file=sys.stderr, flush=True)
            of["trials"] += 1
            for trial in folder.glob("trial-*"):
                shutil.rmtree(trial, ignore_errors=True)
            if options.json is not None:
                write_json(options.json, counts)
    finally:
        shop.close()
        shutil.rmtree(folder, ignore_errors=True)
    print("| kind | trials | faults | problems |\n|---|---:|---:|---:|")
    for name, of in counts.items():
        print(f"| {name} | {of['trials']} | {of['faults']} | {len(of['problems'])} |")
    return int(any(of["problems"] for of in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
