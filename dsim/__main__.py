"""`python -m dsim` is the command line."""

import sys

from dsim.cli import main

if __name__ == "__main__":
    sys.exit(main())
