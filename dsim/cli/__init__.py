"""The command line: a thin shell around the simulator, the profiles and the search.

Every module of it imports only what `dsim --help` needs; commands import the rest when they run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 success, 1 failure, 2 wrong usage or input, 3 no feasible placement, 130 interrupted.

    Args:
        arguments: default: those of the process.
    """
    try:
        from dsim.cli.app import run

        code = run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        from dsim.cli.output import silence_stdout

        # Python would complain once more when it flushes at exit.
        silence_stdout()
        return 0
    return code
