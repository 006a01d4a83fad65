"""`python -m cdt_fast.cli`."""

import sys

from cdt_fast.cli import main

sys.exit(main())
