"""Keep the memory of large CPU tensors in the process between steps."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def disable_malloc_trim() -> bool:
    """Make glibc reuse the memory of freed tensors, and say whether that could be set (glibc on Linux).

    A step frees and allocates the same large tensors again and again. By default each of 32 MiB and more is mapped
    anew, and its page faults can cost more time than the matrix product that fills it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
