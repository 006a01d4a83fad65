"""Memory of large tensors on a CPU: keep it in the process between steps."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_INT = 2**31 - 1


def disable_malloc_trim() -> bool:
    """Make glibc reuse the memory of freed tensors in place of returning it to the system at once.

    A training step frees and allocates the same large tensors again and again. By default each of 32 MiB and more is
    mapped anew, and its page faults can cost more time than the matrix product that fills it. The setting holds for the
    whole process; its memory then stays at its peak until it ends.

    Returns:
        Whether it could be set (glibc on Linux); elsewhere nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))
