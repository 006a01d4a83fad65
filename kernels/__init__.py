"""Triton kernels with their launchers and block shapes, a file an op; installed as `cdt_fast.kernels`.

`_common.py` has the device functions that several kernels share. These files need Triton, and of `cdt_fast` no more
than `ops/common.py`. Importing the package needs neither Triton nor a GPU.
"""
