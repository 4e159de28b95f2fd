"""The command line: a thin shell around the simulator, the profiles and the search.

Every module of it imports only what `dsim --help` needs; commands import the rest when they run.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 success, 1 failure, 2 wrong usage or input, 3 no feasible placement, 130 interrupted, 143 told to end (SIGTERM).

    Args:
        arguments: default: those of the process.
    """
    with _ended_as_by_ctrl_c() as told:
        code = _run(arguments)
    return 143 if told and code == 130 else code


def _run(arguments: Sequence[str] | None) -> int:
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


@contextlib.contextmanager
def _ended_as_by_ctrl_c() -> Iterator[list[int]]:
    """Make of SIGTERM, which batch systems send, what Ctrl-C is; provide the list that the signal is noted in."""
    told: list[int] = []

    def hear(number: int, frame: object) -> None:
        told.append(number)
        raise KeyboardInterrupt

    # Whoever calls `main` from a program may have a way of its own.
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield told
        return
    try:
        signal.signal(signal.SIGTERM, hear)
    except ValueError:  # not in the main thread, where signals are heard
        yield told
        return
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
