"""The command line of the fuzzing."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from cdt_fast import ops
from cdt_fast.files import read_json, write_json
from tests.fuzz.cases import CASES
from tests.fuzz.judge import judge

SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="of each op")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--ops", default=",".join(CASES))
    parser.add_argument("--backend", choices=("torch", "triton"), default="torch")
    parser.add_argument("--minutes", type=float, default=1e6, help="at most so long")
    parser.add_argument("--json", type=Path, help="goes on where the counts in this file end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ops.use_backend(options.backend)
    counts: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        counts = read_json(options.json)
    until = time.monotonic() + 60 * options.minutes
    for op in options.ops.split(","):
        of = counts.setdefault(f"{op}, {options.backend}", {"cases": 0, "kinds": {}, "problems": []})
        while of["cases"] < options.cases and time.monotonic() < until:
            seed = options.seed + of["cases"]
            try:
                kind = judge(op, seed, options.backend)
                of["kinds"][kind] = of["kinds"].get(kind, 0) + 1
            except Exception as error:
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                of["problems"].append({"seed": seed, "problem": problem})
                if len(of["problems"]) <= SHOWN:
                    print(f"{op}, seed {seed}: {problem}", file=sys.stderr, flush=True)
            of["cases"] += 1
            if options.json is not None and of["cases"] % 500 == 0:
                write_json(options.json, counts)
    if options.json is not None:
        write_json(options.json, counts)
    kinds = sorted({kind for of in counts.values() for kind in of["kinds"]})
    print(f"| op, backend | cases | {' | '.join(kinds)} | problems |\n|---|{'---:|' * (len(kinds) + 2)}")
    for name, of in counts.items():
        numbers = [of["cases"], *(of["kinds"].get(kind, 0) for kind in kinds), len(of["problems"])]
        print(f"| {name} | {' | '.join(map(str, numbers))} |")
    return int(any(of["problems"] for of in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
