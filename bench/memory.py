"""Peak memory of one step: what it needs beyond what rests between two steps.

    python -m cdt_fast.bench.memory SUITE CASE IMPLEMENTATION SIZE

Inputs, parameters, gradients and the optimizer's state that one step leaves for the next are not counted: they are
there before it begins, whatever computes it. What a step allocates on top, at its peak, is.

On a GPU the CUDA allocator says it. On a CPU each implementation has a process of its own, with freed memory kept as in
the training loop. It runs one step (libraries are loaded, kernels compiled, state allocated), gives the freed memory
back to the system, notes what is resident, resets the system's mark of the largest resident size, and runs one step
more: the growth of the mark is the figure.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from cdt_fast.bench.baselines.compiled import name_of
from cdt_fast.bench.case import Case, Implementation, Step, Unavailable
from cdt_fast.bench.suites import SIZES, SUITES
from cdt_fast.training.allocator import disable_malloc_trim

_STATUS = Path("/proc/self/status")
_MARK = Path("/proc/self/clear_refs")
_RESET_MARK = "5"


class NotMeasured(Exception):
    """There is no figure; the message is the reason. A figure of 0 is a figure."""


def allocator_peak(step: Callable[[], object], device: torch.device) -> int:
    """Bytes that `step` has allocated at its peak beyond what is allocated before it, by the CUDA allocator."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def resident_peak(step: Callable[[], object]) -> int:
    """Bytes by which the resident memory of this process grows at the peak of `step`. Call it once in a process.

    Raises:
        NotMeasured: the system does not say (it is Linux that does), or its mark cannot be reset.
    """
    step()
    gc.collect()
    # glibc keeps what was freed in the middle of its heap; a second step would fill it without growing the process.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        before = _resident("VmRSS")
        _MARK.write_text(_RESET_MARK, encoding="ascii")
        # A system that takes the number and does nothing with it is found out here.
        if _resident("VmHWM") - _resident("VmRSS") >= 2**22:
            raise OSError("it stays where it was")
    except OSError as error:
        raise NotMeasured(f"the mark of the largest resident size cannot be reset here ({error})") from error
    step()
    return max(0, _resident("VmHWM") - before)


def _resident(entry: str) -> int:
    (line,) = (line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{entry}:"))
    return int(line.split()[1]) * 1024


def find(suite: str, case: str, name: str, size: str, device: torch.device) -> Implementation:
    """The implementation of a case by name.

    Raises:
        LookupError: there is none.
    """
    for one in SUITES[suite](device, size):
        for candidate in one.implementations:
            if (one.name, candidate.name) == (case, name):
                return candidate
    raise LookupError(f"suite {suite} has no case {case!r} with {name!r} at size {size}")


def peak_memory(size: str, device: torch.device) -> Callable[[Case, Implementation, Step], int | str]:
    """How a run takes peak memory: the function that `measure.measure` asks for."""

    def by_allocator(case: Case, one: Implementation, step: Step) -> int | str:
        if name_of("max-autotune") in one.name and "no-cudagraphs" not in one.name:
            return "a CUDA graph's memory is allocated once and held, which a step does not show"
        return allocator_peak(step, device)

    def by_process(case: Case, one: Implementation, step: Step) -> int | str:
        if size == "toy":
            return "at toy size a step is smaller than what the system counts in"
        try:
            return peak_in_a_process("cdt_fast.bench.memory", case.suite, case.name, one.name, size)
        except NotMeasured as reason:
            return str(reason)

    return by_allocator if device.type == "cuda" else by_process


def peak_in_a_process(module: str, *arguments: str) -> int:
    """What `python -m module arguments…` measures of itself by `report_peak`, a process that has computed nothing yet.

    Raises:
        NotMeasured: it gave no figure; the reason.
    """
    process = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["nothing"])[-1]
        raise NotMeasured(f"the process that measures it ended with status {process.returncode}: {last}"[:300])
    answer = json.loads(process.stdout.splitlines()[-1])
    if answer["peak_bytes"] is None:
        raise NotMeasured(answer["reason"])
    return answer["peak_bytes"]


def report_peak(prepare: Callable[[], Callable[[], object]]) -> None:
    """Print `{"peak_bytes": …, "reason": …}` of the step that `prepare` returns."""
    disable_malloc_trim()
    answer: dict[str, int | str | None] = {"peak_bytes": None, "reason": ""}
    try:
        answer["peak_bytes"] = resident_peak(prepare())
    except (NotMeasured, Unavailable) as reason:
        answer["reason"] = str(reason)
    print(json.dumps(answer))


def main() -> None:
    """One implementation in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("suite", choices=SUITES, help="name of the suite")
    parser.add_argument("case", help="name of the case")
    parser.add_argument("implementation", help="name of the implementation")
    parser.add_argument("size", choices=SIZES, help="shapes of the suite")
    options = parser.parse_args()
    try:
        one = find(options.suite, options.case, options.implementation, options.size, torch.device("cpu"))
    except LookupError as error:
        sys.exit(str(error))
    report_peak(one.prepare)


if __name__ == "__main__":
    main()
