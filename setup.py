"""Entry point for setuptools; all metadata is in pyproject.toml. What `cdt_fast` links to is installed below it: a
top-level package called `kernels` would shadow the library of that name which transformers looks for."""

from setuptools import setup

setup()
