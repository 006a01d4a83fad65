"""A run of the bench: suite by suite and case by case, with tables on stdout and the figures in results files."""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from cdt_fast.bench import document, pictures, results_file
from cdt_fast.bench.machine import describe
from cdt_fast.bench.measure import Rounds, measure
from cdt_fast.bench.memory import peak_memory
from cdt_fast.bench.suites import SUITES
from cdt_fast.checks import InputError, check_integer
from cdt_fast.files import write_json
from cdt_fast.training.allocator import disable_malloc_trim

# On two cores the whole bench then takes less than an hour, most of which are preparation, compilation and memory.
ROUNDS = {"cpu": Rounds(5, 15, 8.0), "cuda": Rounds(10, 50, 5.0)}


def run_command(options: argparse.Namespace) -> int:
    """Run what the options ask for. A suite's table goes to stdout, and each case into its file as soon as it is known:
    a run that is stopped has not been for nothing.

    Raises:
        InputError: a GPU is asked for and there is none, `--repeats` is below 1, `--case` is part of no name, or a
            file in the place of a results file is none.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is cuda, but torch finds no CUDA GPU here")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = options.size or ("gpu" if device.type == "cuda" else "cpu")
    suites = list(dict.fromkeys(options.suite or SUITES))
    rounds = ROUNDS[device.type]
    if options.repeats is not None:
        check_integer("--repeats", options.repeats, 1)
        rounds = Rounds(options.repeats, options.repeats, 0.0)
    every = {}
    for name in suites:
        try:
            every[name] = list(SUITES[name](device, size))
        except ImportError as error:  # of a package that this suite needs, and others do not
            print(f"{name}: left out: {type(error).__name__}: {error}", file=sys.stderr)
    chosen = {name: [case for case in cases if (options.case or "") in case.name] for name, cases in every.items()}
    count = sum(map(len, chosen.values()))
    if options.case and not count:
        raise InputError(f"--case is {options.case!r}, which no name of a case of {', '.join(suites)} contains")
    kept = device.type == "cpu" and disable_malloc_trim()
    machine = describe(device, "freed memory kept" if kept else "as it comes")
    run = {"machine": machine, "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M:%S}"}
    folder = Path(options.out)
    files = {
        name: results_file.open_file(folder, device.type, name, size, machine["name"])
        for name, cases in chosen.items()
        if cases
    }
    options.hint = f"; what was measured so far is in {shlex.quote(str(folder))}"
    torch.manual_seed(0)
    peak = functools.partial(peak_memory, size, device)
    done, begun = 0, time.perf_counter()
    for name, (path, contents) in files.items():
        measured: list[dict[str, Any]] = []
        for case in chosen[name]:
            measured.append(measure(case, device, rounds, peak))
            results_file.add(contents, measured[-1], run, [case.name for case in every[name]])
            write_json(path, contents)
            gc.collect()  # the tensors of a case hang on closures that know each other
            done += 1
            left = (time.perf_counter() - begun) / done * (count - done) / 60
            print(f"{name}: {case.name}: {done} of {count}, about {left:.0f} min left", file=sys.stderr, flush=True)
        print(document.suite_as_text(name, measured), flush=True)
    pictures.draw(dict(files.values()))
    print(f"written to {', '.join(str(path) for path, _ in files.values())}")
    return 0
