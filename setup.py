"""Entry point for setuptools; all metadata is in pyproject.toml.

`cdt_fast/kernels`, `cdt_fast/models` and `cdt_fast/bench` are links to the top-level folders, which are installed below
`cdt_fast`: a top-level package called `kernels` would shadow the library of that name which transformers looks for.
"""

from setuptools import setup

setup()
