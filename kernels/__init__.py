"""Triton kernels with their launchers and block shapes, a file an op; installed as `cdt_fast.kernels`. The files need
Triton, and of `cdt_fast.ops` `common` and `products` alone; importing the package needs neither Triton nor a GPU."""
