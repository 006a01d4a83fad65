"""Only the folder-to-package mapping: `kernels`, `models` and `bench` are installed below `cdt_fast`.

Everything else is in pyproject.toml. A top-level package called `kernels` would shadow the library of that name
which transformers looks for. The report of the compiled kernels (`kernels/aot`) and a GPU's triage (`bench/triage`) are
tools of this repository and are not in the wheel; an editable installation finds them all the same.
"""

from setuptools import find_packages, setup

packages = find_packages(include=["cdt_fast", "cdt_fast.*"])
mapping = {"cdt_fast": "cdt_fast"}
for folder in ("kernels", "models", "bench"):
    mapping[f"cdt_fast.{folder}"] = folder
    packages.append(f"cdt_fast.{folder}")
    packages.extend(f"cdt_fast.{folder}.{name}" for name in find_packages(folder, exclude=["aot", "aot.*", "triage"]))

setup(packages=packages, package_dir=mapping)
