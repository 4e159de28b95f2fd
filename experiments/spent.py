"""Spent: the time that a search takes, in this process and in its workers, without their start."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from placement.runner import local_processes

#: Longest wait for workers to start, and how long each stays busy so that the next one gets a task too.
_STARTED_S, _BUSY_S = 60.0, 0.02


@dataclass(slots=True)
class Spent:
    """What a block took; NaN until it ends.

    Args:
        elapsed_s: on the clock.
        cpu_s: of this process and of the workers, all of which have ended; None where the system does not say.
    """

    elapsed_s: float = float("nan")
    cpu_s: float | None = float("nan")


@contextlib.contextmanager
def timed_processes(jobs: int) -> Iterator[tuple[Executor | None, Spent]]:
    """Provide an executor of `jobs` processes that have started, None for one, and what the block within takes."""
    spent = Spent()
    children_s = _children_s()
    start_s = 0.0
    with local_processes(jobs) as executor:
        if executor is not None:
            start_s = _start(executor, jobs)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        yield executor, spent
        spent.elapsed_s, own_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    after_s = _children_s()
    if executor is None:
        spent.cpu_s = own_s
    elif children_s is None or after_s is None:
        spent.cpu_s = None
    else:
        spent.cpu_s = own_s + after_s - children_s - start_s


def _start(executor: Executor, jobs: int) -> float:
    """Wait until every worker has imported what a search needs; return the CPU seconds that this took."""
    seen: dict[int, float] = {}
    until_s = time.monotonic() + _STARTED_S
    while len(seen) < jobs and time.monotonic() < until_s:
        seen |= dict(executor.map(_report, range(jobs)))
    return sum(seen.values())


def _report(_number: int) -> tuple[int, float]:
    """Return this process's id and the CPU seconds that it has taken so far."""
    from placement import search  # noqa: F401 what a worker runs

    time.sleep(_BUSY_S)
    return os.getpid(), time.process_time()


def _children_s() -> float | None:
    """Return the CPU seconds of the processes that this one has started and that have ended."""
    try:
        import resource
    except ImportError:  # on Windows
        return None
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
