"""A run of the bench: suite by suite and case by case, with tables on stdout and the figures in results files."""

import argparse
import datetime
import gc
import importlib
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import torch

from cdt_fast.bench import results_file
from cdt_fast.bench.document import line_of, table_of, untimed
from cdt_fast.bench.measure import measure
from cdt_fast.bench.suites import NAMES
from cdt_fast.checks import InputError, check_integer
from cdt_fast.files import write_json
from cdt_fast.tables import as_text
from cdt_fast.training.execution import disable_malloc_trim

SUITES = {name: importlib.import_module(f"cdt_fast.bench.suites.{name}").cases for name in NAMES}


def run_command(options: argparse.Namespace) -> int:
    """Run what the options ask for; each case is printed and saved as soon as it is measured."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is cuda, but torch finds no CUDA GPU here")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = options.size or ("gpu" if device.type == "cuda" else "cpu")
    if options.repeats is not None:
        check_integer("--repeats", options.repeats, 1)
    for name in ("AUTOTUNE_NUM_CHOICES_DISPLAYED", "MAX_AUTOTUNE_REPORT_CHOICES_STATS"):
        os.environ[f"TORCHINDUCTOR_{name}"] = "0"  # else torch.compile prints what its autotuning tries
    parts = dict.fromkeys(SUITES, options.case or "")  # of the names of cases
    if options.quick and not options.case:
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        parts = {"step": "DUST tied", "cross_entropy": f"{dtype}, GPT2", "ops": f"unrolled_layer, {dtype}"}
    suites = {name: list(SUITES[name](device, size)) for name in options.suite or parts}
    chosen = [case for name in suites for case in suites[name] if parts.get(name, "") in case.name]
    if not chosen:
        (one, *_) = (case.name for cases in suites.values() for case in cases)
        raise InputError(f"--case is {options.case!r}, which is in no name of {', '.join(suites)}; one name is {one!r}")
    kept = device.type == "cpu" and disable_malloc_trim()
    machine = results_file.describe(device, "freed memory kept" if kept else "as it comes")
    run = {"machine": machine, "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S}"}
    options.out = options.out or "benchmarks" * (not options.quick)
    folder = Path(options.out)
    names = dict.fromkeys(case.suite for case in chosen)
    files = {name: results_file.open_file(folder, device.type, name, size, machine["name"]) for name in names}
    if options.out:
        folder.mkdir(parents=True, exist_ok=True)
    if options.quick:
        minutes = -(-len(chosen) // 2)
        print(f"{len(chosen)} cases, about {minutes} min, most of it for torch.compile", file=sys.stderr)
        options.repeats = options.repeats or 3
    found = []
    torch.manual_seed(0)
    for number, case in enumerate(chosen, 1):
        print(f"{case.suite}, case {number} of {len(chosen)}: {case.name}", file=sys.stderr, flush=True)
        if options.quick:
            few = (one for one in case.implementations if one.role != "peer" or one.name == "torch.compile")
            case = replace(case, implementations=tuple(few))
        found.append(measure(case, device, options.repeats))
        path, contents = files[case.suite]
        known = next((one for one in contents["cases"] if one["case"] == case.name), None)
        if options.quick and known and known["implementations"].keys() - found[-1]["implementations"].keys():
            print(f"{path} keeps its measurement, of more peers", file=sys.stderr)
        else:
            results_file.add(contents, found[-1], run, [case.name for case in suites[case.suite]])
        if options.out:
            write_json(path, contents)
            options.hint = f"; what was measured so far is in {shlex.quote(str(folder))}"
        if not options.quick:
            print(line_of(found[-1]), flush=True)
        gc.collect()  # the tensors of a case hang on closures that know each other
    if options.quick:
        print(as_text(table_of(found)))
        for name, remark in untimed(found):
            if not remark.startswith("unavailable"):
                print(f"{name} {remark}")
    every = [one for case in found for one in case["implementations"].values()]
    if missing := dict.fromkeys(one["reason"] for one in every if one["status"] == "unavailable"):
        print("unavailable here:", "; ".join(missing))
    if options.out:
        print("written to", ", ".join(str(path) for path, _ in files.values()))
    return 0
