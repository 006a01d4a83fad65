"""`python -m cdt_fast`: the command line."""

import sys

from cdt_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
