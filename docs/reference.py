"""Write the API reference, from the docstrings, into a folder: `python docs/reference.py build/docs` (`make docs`)."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

import pdoc

# `cdt_fast` brings the packages that its __all__ names, ops and models, with it.
PAGES = ("cdt_fast", "cdt_fast.constraints", "cdt_fast.integrations")
# Of an op's folder the reader wants the function and its formula; how they are computed is for the source.
INTERNAL = (r"!cdt_fast\.ops\.shared", r"!cdt_fast\.ops\.\w+\.(?!reference$)\w+")


def main(folder: str) -> None:
    """Write the pages; a public name that cannot be imported is an error."""
    for name in (*PAGES, "cdt_fast.ops", "cdt_fast.models"):
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            # pdoc reads a module's dictionary, where names that are imported when asked for are not yet.
            vars(module)[public] = getattr(module, public)
    warnings.filterwarnings("error", module="pdoc")
    # A type that is imported for type checkers alone is shown as it is written.
    warnings.filterwarnings("ignore", message="Error parsing type annotation", module="pdoc")
    pdoc.render.configure(docformat="google", footer_text="cdt_fast")
    pdoc.pdoc(*PAGES, *INTERNAL, output_directory=Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
