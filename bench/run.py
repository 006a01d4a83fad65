"""A run of the bench: suite by suite and case by case, with tables on stdout and the figures in results files."""

from __future__ import annotations

import argparse
import datetime
import gc
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cdt_fast.bench import pictures, tables
from cdt_fast.bench.case import Case
from cdt_fast.bench.ceilings import Ceilings
from cdt_fast.bench.clock import Rounds
from cdt_fast.bench.fits import fit_series
from cdt_fast.bench.machine import describe
from cdt_fast.bench.measure import measure
from cdt_fast.bench.memory import peak_memory
from cdt_fast.bench.progress import Progress
from cdt_fast.bench.results_file import ResultsFile
from cdt_fast.bench.suites import SUITES
from cdt_fast.checks import check_integer
from cdt_fast.errors import InputError
from cdt_fast.files import write_json
from cdt_fast.training.allocator import disable_malloc_trim

# On two cores the whole bench then takes less than an hour, most of which are preparation, compilation and memory.
ROUNDS = {"cpu": Rounds(5, 15, 8.0, of_slow=3), "cuda": Rounds(10, 50, 5.0, of_slow=5)}


def run_command(options: argparse.Namespace) -> int:
    """Run what the options of `arguments.add_arguments` ask for.

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
        rounds = Rounds.exactly(check_integer("--repeats", options.repeats, 1))
        command += f" --repeats {options.repeats}"
    if options.case:
        command += f" --case {shlex.quote(options.case)}"
    kept = device.type == "cpu" and disable_malloc_trim()
    machine = {**describe(device, "freed memory kept" if kept else "as it comes"), "command": command}
    every, missing = _cases(suites, device, size)
    chosen = {name: [case for case in cases if (options.case or "") in case.name] for name, cases in every.items()}
    if options.case and not any(chosen.values()):
        raise InputError(f"--case is {options.case!r}, which no name of a case of {', '.join(suites)} contains")
    run = {"machine": machine, "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M}"}
    folder = Path(options.out)
    files = {
        name: ResultsFile(folder, device.type, name, size, run, [case.name for case in cases])
        for name, cases in every.items()
    }
    options.hint = f"; what was measured so far is in {shlex.quote(str(folder))}"

    def save(suite: str, case: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        files[suite].add(case, result["ceilings"])
        if options.json:
            write_json(options.json, result)

    earlier = {(name, case): taken for name, file in files.items() for case, taken in file.wall_seconds.items()}
    result = run_suites(device, size, chosen, missing, rounds, run, save, earlier)
    if options.json:
        write_json(options.json, result)
    written = [files[name] for name in suites if chosen[name]]
    if not options.no_pictures:
        print(_drawn(written))
    print(f"written to {', '.join([*(str(file.path) for file in written), *filter(None, [options.json])])}")
    return 0


def _drawn(written: Sequence[ResultsFile]) -> str:
    """Draw the pictures of results files; which ones, in words."""
    try:
        drawn = [pictures.write_picture(file.path.with_suffix(".png"), file.contents) for file in written]
    except ImportError as error:
        return f"no pictures: {error}"
    return f"pictures: {', '.join(str(path) for path in drawn if path) or 'none, as nothing was timed'}"


def _cases(suites: Sequence[str], device: torch.device, size: str) -> tuple[dict[str, list[Case]], dict[str, str]]:
    """The cases of each suite, and why there are none of a suite that needs a package which is missing."""
    cases: dict[str, list[Case]] = {}
    missing: dict[str, str] = {}
    for name in suites:
        cases[name] = []
        try:
            cases[name] += SUITES[name](device, size)
        except ImportError as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return cases, missing


def run_suites(
    device: torch.device,
    size: str,
    chosen: Mapping[str, Sequence[Case]],
    missing: Mapping[str, str],
    rounds: Rounds,
    run: Mapping[str, Any],
    save: Callable[[str, Mapping[str, Any], Mapping[str, Any]], None],
    earlier: Mapping[tuple[str, str], float],
) -> dict[str, Any]:
    """Measure cases.

    Args:
        device, size: where, and with which shapes.
        chosen: the cases of each suite.
        missing: why there are none of a suite.
        rounds: how often each is timed.
        run: the head of the result: machine and date.
        save: called after each case, and each part of one, with its suite, what was measured of it, and all that is
            known: a run that is stopped has not been for nothing.
        earlier: seconds that cases took before, by suite and name: how long this run will take follows from them.

    Returns:
        What `run` says, `size`, `complete`, `ceilings`, and `suites`: for each its `cases` and `fits`, or the `reason`
        why it could not run.
    """
    torch.manual_seed(0)
    ceilings = Ceilings(device, size)
    peak = peak_memory(size, device)
    result: dict[str, Any] = {**run, "size": size, "complete": False, "ceilings": {}, "suites": {}}
    progress = Progress([(name, case.name) for name, cases in chosen.items() for case in cases], earlier)
    progress.begin()
    for name, cases in chosen.items():
        suite = result["suites"][name] = {"reason": missing.get(name, ""), "cases": [], "fits": []}
        for case in cases:
            started = time.perf_counter()
            measured: list[dict[str, Any]] = suite["cases"]
            for number, part in enumerate(parts_of(case, device)):
                found = measure(part, device, rounds, ceilings, peak)
                taken = time.perf_counter() - started
                measured[len(measured) - (number > 0) :] = [{**found, "wall_seconds": taken}]
                suite["fits"] = fit_series(measured)
                result["ceilings"] = ceilings.as_dict()
                save(name, measured[-1], result)
                gc.collect()  # the tensors of a case hang on closures that know each other
            progress.done((name, case.name), time.perf_counter() - started)
        print(tables.suite_as_text(name, suite), flush=True)
    result["complete"] = True
    return result


def parts_of(case: Case, device: torch.device) -> list[Case]:
    """What is measured of a case, each in place of the one before: on a GPU, which may be lent for minutes, first all
    but the ways that take long to prepare."""
    early = tuple(way for way in case.ways if not way.late)
    return [replace(case, ways=early), case] if device.type == "cuda" and 0 < len(early) < len(case.ways) else [case]


def chosen_device(asked: str | None) -> torch.device:
    if asked == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is cuda, but torch finds no CUDA GPU here")
    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
