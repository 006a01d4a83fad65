"""`python -m cdt_fast.bench`: `cdt-fast bench` where the packages that the other commands need are missing."""

from __future__ import annotations

import argparse
import sys

from cdt_fast.bench.arguments import add_arguments
from cdt_fast.bench.run import run_command
from cdt_fast.errors import InputError


def main() -> int:
    """Run the bench; bad input is one line on stderr and status 2, an interruption one and status 130."""
    parser = argparse.ArgumentParser(
        prog="python -m cdt_fast.bench", description="Measure the ops and the training step.", allow_abbrev=False
    )
    add_arguments(parser)
    options = parser.parse_args()
    try:
        return run_command(options)
    except InputError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted{getattr(options, 'hint', '')}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
