"""A run of the bench: suite by suite and case by case, with tables on stdout and the figures in results files."""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cdt_fast.bench import pictures, results_file, tables
from cdt_fast.bench.case import Case
from cdt_fast.bench.ceilings import Ceilings
from cdt_fast.bench.clock import Rounds
from cdt_fast.bench.machine import describe
from cdt_fast.bench.measure import measure
from cdt_fast.bench.memory import peak_memory
from cdt_fast.bench.suites import SUITES
from cdt_fast.checks import check_integer
from cdt_fast.errors import InputError
from cdt_fast.files import write_json
from cdt_fast.training.allocator import disable_malloc_trim

# On two cores the whole bench then takes less than an hour, most of which are preparation, compilation and memory.
ROUNDS = {"cpu": Rounds(5, 15, 8.0), "cuda": Rounds(10, 50, 5.0)}


def run_command(options: argparse.Namespace) -> int:
    """Run what the options ask for. A suite's table goes to stdout, and each part of a case into its file as soon as it
    is known: a run that is stopped has not been for nothing.

    Raises:
        InputError: a GPU is asked for and there is none, `--repeats` is below 1, `--case` is part of no name, or a
            file in the place of a results file is none.
    """
    device = chosen_device(options.device)
    size = options.size or ("gpu" if device.type == "cuda" else "cpu")
    suites = list(dict.fromkeys(options.suite or SUITES))
    rounds = ROUNDS[device.type]
    command = f"cdt-fast bench --suite {' '.join(suites)} --device {device.type} --size {size}"
    if options.repeats is not None:
        check_integer("--repeats", options.repeats, 1)
        rounds = Rounds(options.repeats, options.repeats, 0.0)
        command += f" --repeats {options.repeats}"
    if options.case:
        command += f" --case {shlex.quote(options.case)}"
    kept = device.type == "cpu" and disable_malloc_trim()
    machine = {**describe(device, "freed memory kept" if kept else "as it comes"), "command": command}
    run = {"machine": machine, "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M:%S}"}
    every: dict[str, list[Case]] = {}
    for name in suites:
        try:
            every[name] = list(SUITES[name](device, size))
        except ImportError as error:  # of a package that this suite needs, and others do not
            print(f"{name}: left out: {type(error).__name__}: {error}", file=sys.stderr)
    chosen = {name: [case for case in cases if (options.case or "") in case.name] for name, cases in every.items()}
    count = sum(map(len, chosen.values()))
    if options.case and not count:
        raise InputError(f"--case is {options.case!r}, which no name of a case of {', '.join(suites)} contains")
    folder = Path(options.out)
    files = {
        name: results_file.open_file(folder, device.type, name, size, machine["name"])
        for name, cases in chosen.items()
        if cases
    }
    options.hint = f"; what was measured so far is in {shlex.quote(str(folder))}"
    torch.manual_seed(0)
    ceilings, peak = Ceilings(device, size), functools.partial(peak_memory, size, device)
    done, begun = 0, time.perf_counter()
    for name, (path, contents) in files.items():
        order = [case.name for case in every[name]]
        measured: list[dict[str, Any]] = []
        for case in chosen[name]:
            started, result = time.perf_counter(), {}
            for part in parts_of(case, device):
                result = measure(part, device, rounds, ceilings, peak)
                results_file.add(contents, result, {**run, "ceilings": ceilings.as_dict()}, order)
                write_json(path, contents)
                gc.collect()  # the tensors of a case hang on closures that know each other
            measured.append(result)
            done += 1
            now = time.perf_counter()
            left = f", about {(now - begun) / done * (count - done) / 60:.0f} min left" if done < count else ""
            print(f"{name}: {case.name}: {now - started:.1f} s; {done} of {count}{left}", file=sys.stderr, flush=True)
        print(tables.suite_as_text(name, measured), flush=True)
    pictures.draw(dict(files.values()))
    print(f"written to {', '.join(str(path) for path, _ in files.values())}")
    return 0


def parts_of(case: Case, device: torch.device) -> list[Case]:
    """What is measured of a case, each in place of the one before: on a GPU, which may be lent for minutes, first all
    but the implementations that take long to prepare."""
    early = tuple(candidate for candidate in case.implementations if not candidate.late)
    if device.type == "cuda" and 0 < len(early) < len(case.implementations):
        return [replace(case, implementations=early), case]
    return [case]


def chosen_device(asked: str | None) -> torch.device:
    """The device that is asked for, or the one that is there."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is cuda, but torch finds no CUDA GPU here")
    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
