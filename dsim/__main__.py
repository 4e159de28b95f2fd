"""`python -m dsim` is the command line."""

import sys

from dsim.cli import main

if __name__ == "__main__":
    code = main()
    # After an interrupt within exec(), which makes every dataclass, Python ends by SIGINT whatever the code is, unless
    # another exec() has come to its end.
    exec("")  # noqa: S102
    sys.exit(code)
