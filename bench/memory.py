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

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from cdt_fast.bench.baselines.support import name_of_mode
from cdt_fast.bench.case import Case, Implementation, Step, Unavailable
from cdt_fast.bench.suites import SUITES
from cdt_fast.training.allocator import disable_malloc_trim

_STATUS = Path("/proc/self/status")
_MARK = Path("/proc/self/clear_refs")


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
        OSError: the system does not say (it is Linux that does), or its mark cannot be reset.
    """
    step()
    gc.collect()
    # glibc keeps what was freed in the middle of its heap; a second step would fill it without growing the process.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    before = _resident("VmRSS")
    _MARK.write_text("5", encoding="ascii")
    if _resident("VmHWM") - _resident("VmRSS") >= 2**22:  # there are systems that take the number and do nothing
        raise OSError("the mark of the largest resident size cannot be reset here")
    step()
    return max(0, _resident("VmHWM") - before)


def _resident(entry: str) -> int:
    (line,) = (line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{entry}:"))
    return int(line.split()[1]) * 1024


def peak_memory(size: str, device: torch.device, case: Case, one: Implementation, step: Step) -> int | str:
    """Peak memory of an implementation of a case, or the reason why there is no figure."""
    if device.type == "cuda":
        if name_of_mode("max-autotune") in one.name and "no-cudagraphs" not in one.name:
            return "a CUDA graph's memory is allocated once and held, which a step does not show"
        return allocator_peak(step, device)
    if size == "toy":
        return "at toy size a step is smaller than what the system counts in"
    return peak_in_a_process("cdt_fast.bench.memory", case.suite, case.name, one.name, size)


def peak_in_a_process(module: str, *arguments: str) -> int | str:
    """What `python -m module arguments…` says of itself by `report_peak`: bytes, or why there is no figure."""
    process = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["nothing"])[-1]
        return f"the process that measures it ended with status {process.returncode}: {last}"[:300]
    return json.loads(process.stdout.splitlines()[-1])


def report_peak(prepare: Callable[[], Callable[[], object]]) -> None:
    """Print the peak of the step that `prepare` returns, in a process that has computed nothing yet."""
    disable_malloc_trim()
    try:
        answer: int | str = resident_peak(prepare())
    except (OSError, Unavailable) as reason:
        answer = str(reason)
    print(json.dumps(answer))


def main() -> None:
    """One implementation in this process."""
    suite, case, name, size = sys.argv[1:]
    for one in SUITES[suite](torch.device("cpu"), size):
        for candidate in one.implementations:
            if (one.name, candidate.name) == (case, name):
                return report_peak(candidate.prepare)
    sys.exit(f"suite {suite} has no case {case!r} with {name!r} at size {size}")


if __name__ == "__main__":
    main()
