"""`python -m dsim` is the command line."""

import sys

from dsim.cli import main

sys.exit(main())
