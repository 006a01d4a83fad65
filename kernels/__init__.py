"""Triton kernels and their launchers, a file a kernel family; installed as `cdt_fast.kernels`.

This package imports Triton and nothing else of `cdt_fast`. Importing it needs neither Triton nor a GPU.
"""

from __future__ import annotations


def unavailable() -> str | None:
    """Why no kernel can run here, or None where kernels can."""
    return "this version of cdt_fast has no Triton kernels yet"
