"""Compiled kernels on the CPU: the PTX that Triton makes for a card, executed thread by thread in NumPy.

Triton's interpreter runs a kernel's source, one block after the other, and knows no bfloat16. This runs what the
compiler made of it: masks, layouts, swizzled shared memory, asynchronous copies and tensor cores as they are on the
card. It also finds what a GPU would not say: a byte read outside of every argument, an address that is not aligned,
and two warps that touch one place without a barrier between them. `install` takes the place of Triton's driver; the
tests of the kernels do that with `--emulate`.
"""

from .launch import install
from .ptx import Fault

__all__ = ["Fault", "install"]
