"""A run of the bench: suite by suite and case by case, with tables on stdout and the figures in results files."""

from __future__ import annotations

import argparse
import datetime
import gc
import shlex
import sys
from pathlib import Path

import torch

from cdt_fast.bench import results_file
from cdt_fast.bench.document import case_as_text
from cdt_fast.bench.measure import measure
from cdt_fast.bench.suites import SUITES
from cdt_fast.checks import InputError, check_integer
from cdt_fast.files import write_json
from cdt_fast.training.execution import disable_malloc_trim


def run_command(options: argparse.Namespace) -> int:
    """Run what the options ask for; each case is printed and saved as soon as it is measured."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is cuda, but torch finds no CUDA GPU here")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = options.size or ("gpu" if device.type == "cuda" else "cpu")
    if options.repeats is not None:
        check_integer("--repeats", options.repeats, 1)
    suites = {name: list(SUITES[name](device, size)) for name in options.suite or SUITES}
    chosen = [case for cases in suites.values() for case in cases if (options.case or "") in case.name]
    if not chosen:
        (one, *_) = (case.name for cases in suites.values() for case in cases)
        raise InputError(f"--case is {options.case!r}, which is in no name of {', '.join(suites)}; one name is {one!r}")
    kept = device.type == "cpu" and disable_malloc_trim()
    machine = results_file.describe(device, "freed memory kept" if kept else "as it comes")
    run = {"machine": machine, "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M:%S}"}
    folder = Path(options.out)
    names = dict.fromkeys(case.suite for case in chosen)
    files = {name: results_file.open_file(folder, device.type, name, size, machine["name"]) for name in names}
    options.hint = f"; what was measured so far is in {shlex.quote(str(folder))}"
    torch.manual_seed(0)
    for number, case in enumerate(chosen, 1):
        print(f"{case.suite}, case {number} of {len(chosen)}: {case.name}", file=sys.stderr, flush=True)
        measured = measure(case, device, options.repeats)
        path, contents = files[case.suite]
        results_file.add(contents, measured, run, [case.name for case in suites[case.suite]])
        write_json(path, contents)
        print(case_as_text(measured), flush=True)
        gc.collect()  # the tensors of a case hang on closures that know each other
    print("written to", ", ".join(str(path) for path, _ in files.values()))
    return 0
