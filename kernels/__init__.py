"""Triton kernels and their launchers, named as the op that they belong to; installed as `cdt_fast.kernels`.

| file | what is in it |
|---|---|
| `<op>.py`, `<op>_<family>.py` | the kernels, each with the launcher that checks, allocates and launches |
| `arguments.py` | what an op hands its launcher: one record an op, with shapes |
| `tiles.py` | the device functions that several kernels share |
| `blocks.py` | the shapes of all kernels' blocks |
| `cards.py` | families and limits of GPUs, and why no kernel can run |
| `launch.py` | one launch, that can run or be compiled |
| `aot/` | the report of what they compile to, made without a GPU |

A kernel's module needs Triton, and nothing else of `cdt_fast` but what is in this folder. Importing the package needs
neither Triton nor a GPU, and asks neither.
"""
