"""A run of the bench: suite by suite and case by case, with tables on stdout and everything in one JSON file."""

from __future__ import annotations

import argparse
import datetime
import gc
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cdt_fast.bench import pictures, tables
from cdt_fast.bench.ceilings import Ceilings
from cdt_fast.bench.fits import fit_series
from cdt_fast.bench.machine import describe, file_stem
from cdt_fast.bench.measure import measure
from cdt_fast.bench.memory import peak_memory
from cdt_fast.bench.suites import SUITES
from cdt_fast.checks import check_integer
from cdt_fast.errors import InputError, MissingExtra
from cdt_fast.files import write_json
from cdt_fast.tables import as_text
from cdt_fast.training.allocator import keep_freed_memory

_REPEATS = {"cpu": 7, "cuda": 20}


def run_command(options: argparse.Namespace) -> int:
    """Run what the options of `arguments.add_arguments` ask for.

    Raises:
        InputError: a GPU is asked for and there is none, or `--repeats` is below 1.
    """
    device = _device(options.device)
    size = options.size or ("gpu" if device.type == "cuda" else "cpu")
    repeats = _REPEATS[device.type] if options.repeats is None else check_integer("--repeats", options.repeats, 1)
    suites = list(dict.fromkeys(options.suite or SUITES))
    kept = device.type == "cpu" and keep_freed_memory()
    machine = describe(device, "freed memory kept" if kept else "as it comes")
    command = f"cdt-fast bench --suite {' '.join(suites)} --device {device.type} --size {size} --repeats {repeats}"
    if options.case:
        command += f" --case {shlex.quote(options.case)}"
    folder = Path(options.out)
    files = [folder / f"{file_stem(machine['name'])}.json", *([Path(options.json)] if options.json else [])]
    options.hint = f"; what was measured so far is in {shlex.quote(str(files[0]))}"

    def save(result: dict[str, Any]) -> None:
        for file in files:
            write_json(file, result)

    result = run_suites(device, size, suites, repeats, machine | {"command": command}, save, options.case or "")
    if options.case and not any(suite["cases"] for suite in result["suites"].values()):
        raise InputError(f"--case is {options.case!r}, which no name of a case of {', '.join(suites)} contains")
    try:
        drawn = pictures.write_pictures(folder, files[0].stem, result)
    except ImportError as error:
        print(f"no pictures: {error if isinstance(error, MissingExtra) else f'{error}'}")
    else:
        print(f"pictures: {', '.join(str(path) for path in drawn)}" if drawn else "no pictures: nothing was timed")
    print(f"written to {', '.join(str(file) for file in files)}")
    return 0


def run_suites(
    device: torch.device,
    size: str,
    suites: Sequence[str],
    repeats: int,
    machine: dict[str, Any],
    save: Callable[[dict[str, Any]], None],
    contained: str = "",
) -> dict[str, Any]:
    """Measure the cases of the suites.

    Args:
        device, size, suites, repeats: what, where and how often.
        machine: the head of the result.
        save: called with all that is known after each case, so that a run that is stopped has not been for nothing.
        contained: cases whose name does not contain this are left out.

    Returns:
        `machine`, `date`, `size`, `repeats`, `complete`, `ceilings`, and `suites`: for each its `cases` and `fits`,
        or the reason why it could not run.
    """
    torch.manual_seed(0)
    ceilings = Ceilings(device, size)
    peak = peak_memory(size, device)
    result: dict[str, Any] = {
        "machine": machine,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "size": size,
        "repeats": repeats,
        "complete": False,
        "ceilings": {},
        "suites": {},
    }
    for name in suites:
        suite = result["suites"][name] = {"reason": "", "cases": [], "fits": []}
        try:
            for case in SUITES[name](device, size):
                if contained not in case.name:
                    continue
                started = time.perf_counter()
                measured = measure(case, device, repeats, ceilings, peak)
                print(f"{name}: {case.name}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
                suite["cases"].append(measured)
                suite["fits"] = fit_series(suite["cases"])
                result["ceilings"] = ceilings.as_dict()
                save(result)
                del case
                gc.collect()  # the tensors of a case hang on closures that know each other
        except ImportError as error:
            suite["reason"] = f"{type(error).__name__}: {error}"
        _print_suite(name, suite)
    result["complete"] = True
    save(result)
    return result


def _print_suite(name: str, suite: dict[str, Any]) -> None:
    print(f"\n== {name} ==")
    if suite["reason"]:
        print(suite["reason"])
    for case in suite["cases"]:
        print(f"\n{tables.case_title(case)}")
        print(as_text(tables.case_table(case)))
        for reason in tables.reasons(case):
            print(f"  {reason}")
    if suite["fits"]:
        print("\n" + as_text(tables.fit_table(suite["fits"])))
    sys.stdout.flush()


def _device(asked: str | None) -> torch.device:
    if asked == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is cuda, but torch finds no CUDA GPU here")
    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
