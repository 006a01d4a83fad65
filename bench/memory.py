"""Peak memory of one step: what it needs beyond what rests between two steps.

    python -m cdt_fast.bench.memory SUITE CASE IMPLEMENTATION SIZE

Inputs, parameters, gradients and the optimizer's state are there before a step begins, whatever computes it, and are
not counted. On a GPU the CUDA allocator knows the peak. On a CPU each implementation has a process of its own, with
freed memory kept as in the training loop: it runs one step, gives freed memory back to the system, resets the system's
mark of the largest resident size, and runs one step more; the growth of the mark is the figure.
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

from cdt_fast.bench.case import Case, Implementation, Step, Unavailable
from cdt_fast.bench.suites import SUITES
from cdt_fast.training.allocator import disable_malloc_trim

_STATUS = Path("/proc/self/status")
_MARK = Path("/proc/self/clear_refs")


def allocator_peak(step: Callable[[], object], device: torch.device) -> int:
    """Bytes that `step` allocates at its peak beyond what is allocated before it, by the CUDA allocator."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def resident_peak(step: Callable[[], object]) -> int:
    """Bytes by which the resident memory of this process grows at the peak of `step`. Call it once in a process.

    Raises:
        OSError: the system is not Linux, or its mark cannot be reset.
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
        if one.name.startswith("torch.compile, max-autotune"):
            return "a CUDA graph's memory is allocated once and held, which a step does not show"
        return allocator_peak(step, device)
    if size == "toy":
        return "at toy size a step is smaller than what the system counts in"
    command = [sys.executable, "-m", "cdt_fast.bench.memory", case.suite, case.name, one.name, size]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["nothing"])[-1]
        return f"the process that measures it ended with status {process.returncode}: {last}"[:300]
    return json.loads(process.stdout.splitlines()[-1])


def main() -> None:
    """Print the peak of one implementation as JSON, in a process that has computed nothing yet."""
    suite, case, name, size = sys.argv[1:]
    cases = SUITES[suite](torch.device("cpu"), size)
    found = (one for each in cases if each.name == case for one in each.implementations if one.name == name)
    candidate = next(found, None)
    if candidate is None:
        sys.exit(f"suite {suite} has no case {case!r} with {name!r} at size {size}")
    disable_malloc_trim()
    try:
        answer: int | str = resident_peak(candidate.prepare())
    except (OSError, Unavailable) as reason:
        answer = str(reason)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
