"""The first ten minutes of a GPU: `python -m cdt_fast.bench.tools.triage`.

The smoke tests of the kernels, twelve cases of the suites timed against eager torch, and a check for races in shared
memory. Each is a process with a limit of its own, and a line of JSON in bench/results as soon as it has ended: nothing
that hangs or breaks the card's context takes another result with it.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cdt_fast import ops
from cdt_fast.bench.case import Case, Step
from cdt_fast.bench.measure import checked
from cdt_fast.bench.results_file import describe, file_stem
from cdt_fast.bench.suites import SUITES

MODULE = "cdt_fast.bench.tools.triage"
SMOKE_TESTS = ("-o", "addopts=", "-q", "-p", "no:cacheprovider", "-m", "emulated and not slow", "tests/kernels")
# A suite, and what the name of one of its cases begins with.
CASES = (
    ("step", "DUST tied, constrained, bfloat16"),
    ("step", "VideoUT tied, constrained, bfloat16"),
    ("step", "DUST untied, next readout, constrained, bfloat16"),
    ("cross_entropy", "layerwise cross-entropy, weights known, bfloat16, GPT2-small"),
    ("cross_entropy", "layerwise cross-entropy, weights known, bfloat16, Llama-8B"),
    ("attention", "symmetric attention, bfloat16, B 3200, T 20, d 256, tied values"),
    ("attention", "symmetric attention, bfloat16, B 256, T 512, d 64, tied values"),
    ("attention", "symmetric attention, bfloat16, B 64, T 1024, d 128, tied values"),
    ("ops", "lista_step, bfloat16"),
    ("ops", "unrolled_layer, bfloat16"),
    ("ops", "residual_linear, bfloat16"),
    ("ops", "layerwise_reconstruction_loss, bfloat16"),
)
RACECHECK = ("ops", "unrolled_layer, bfloat16")


def find_case(suite: str, name: str, device: torch.device, size: str) -> Case:
    """The first case of a suite whose name begins so."""
    return next(case for case in SUITES[suite](device, size) if case.name.startswith(name))


def timed(case: Case, do_bench: Callable[[Step], float]) -> dict[str, Any]:
    """Milliseconds of ours and of eager torch, each of which first has to agree with the formula of the case."""
    line: dict[str, Any] = {"case": case.name}
    formula = functools.cache(case.expected)
    with ops.use_backend("triton"):  # never plain torch in the place of a kernel
        for role in ("ours", "eager"):
            candidate = next(one for one in case.implementations if one.role == role)
            step, difference = checked(candidate, formula, case.tolerance)
            line |= {f"{role}_ms": do_bench(step), f"{role}_difference": difference}
    return {**line, "times_as_fast": line["eager_ms"] / line["ours_ms"]}


def run_child(name: str, command: Sequence[str], limit: float) -> dict[str, Any]:
    """The end of a process of the triage, and the line of JSON that it printed last."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if name == "racecheck" else None
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
    except subprocess.TimeoutExpired:
        return {"part": name, "status": f"killed after {limit:g} s"}
    lines = [line.strip()[:2000] for line in (said.stdout + said.stderr).splitlines() if line.strip(" ^\n")]
    if said.returncode:
        return {"part": name, "status": f"failed with status {said.returncode}", "said": lines[-3:]}
    result = next((json.loads(line) for line in lines if line.startswith("{")), {"said": lines[-1:]})
    return {"part": name, "status": "done", **result}


def parts(command: Sequence[str]) -> list[tuple[str, list[str], float]]:
    """The name, the command and the limit in seconds of every part; `command` starts this program."""
    python = [sys.executable, "-m"]
    found = [("smoke tests", [*python, "pytest", *SMOKE_TESTS], 300.0)]
    found += [(name, [*command, "--case", str(number)], 90.0) for number, (_, name) in enumerate(CASES)]
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is not None:
        checked = [sanitizer, "--tool", "racecheck", "--error-exitcode", "99", *command, "--once"]
        found.append(("racecheck", checked, 120.0))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 if a part has failed."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    folder = os.environ.get("OUT") or "bench/results"
    parser.add_argument("--out", default=folder, metavar="DIR", help="folder of the results ($OUT, or bench/results)")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)  # time one in this process
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)  # launch one kernel, for a sanitizer
    options = parser.parse_args(arguments)
    device = torch.device("cuda")
    if options.once:
        with ops.use_backend("triton"):
            case = find_case(*RACECHECK, device, "toy")
            next(one for one in case.implementations if one.role == "ours").prepare()()
        return 0
    if options.case is not None:
        from triton.testing import do_bench

        suite, name = CASES[options.case]
        median: Any = functools.partial(do_bench, return_mode="median")
        print(json.dumps(timed(find_case(suite, name, device, "gpu"), median)))
        return 0
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA GPU here")
    machine = describe(device, "as it comes")
    path = Path(options.out) / f"{file_stem(machine['name'])}-triage.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    run = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M:%S}"
    failed = 0
    with path.open("a", encoding="utf-8") as file:
        print(json.dumps({"run": run, "part": "machine", "status": "done", **machine}), file=file, flush=True)
        for name, command, limit in parts([sys.executable, "-m", MODULE]):
            line = run_child(name, command, limit)
            print(json.dumps({"run": run, **line}), file=file, flush=True)
            figures = [f"{key} {value:.3g}" for key, value in line.items() if isinstance(value, float)]
            print(name, line["status"], *figures, sep=", ", flush=True)
            failed += line["status"] != "done"
    print(f"written to {path}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
