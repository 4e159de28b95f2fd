"""Runner: probes through any executor, in an order that does not depend on it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any, Final, Protocol

from dsim.errors import InternalError
from dsim.pools import Placement
from placement.crew import Fault, crew_of, failed
from placement.probe import Outcome, Probe, Scenario

#: Times that workers may die before they have run anything.
_FALSE_STARTS: Final = 3


class Progress(Protocol):
    """Hears how far a search is."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Hear that `done` of the `total` probes known so far are finished."""
        ...


class Runner:
    """Runs batches of probes; outcomes come in the order of the probes, whoever ran them.

    Args:
        executor: where probes run, a `Crew` with its cache and its limit of time; None: here, one after the other.
    """

    def __init__(
        self, scenario: Scenario, *, executor: Executor | None = None, progress: Progress | None = None
    ) -> None:
        self.scenario = scenario
        self._shift = crew_of(executor).shift(scenario)
        self._progress = progress
        self.probes = 0
        self.requests = 0

    @property
    def faults(self) -> Mapping[Placement, Fault]:
        """Candidates one of whose runs did not end by itself, and why."""
        return self._shift.faults

    def run(self, probes: Sequence[Probe], *, stage: str) -> list[Outcome]:
        """Return the outcome of every probe; all those of a candidate fail that one of them makes fail."""
        total = self.probes + len(probes)
        outcomes = []
        for outcome in self._shift.outcomes(probes):
            outcomes.append(outcome)
            self.probes += 1
            self.requests += outcome.observation.requests
            if self._progress is not None:
                self._progress(stage, self.probes, total)
        return [
            outcome
            if probe.placement not in self.faults
            else failed(self.scenario, probe, self.faults[probe.placement])
            for probe, outcome in zip(probes, outcomes, strict=True)
        ]


class LocalPool(Executor):
    """Worker processes of this machine, replaced when one of them has died."""

    #: They run this process's code.
    code: str | None = None

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._pool = _pool_of(jobs)

    def submit(self, function: Callable[..., Any], /, *arguments: object, **named: object) -> Future[Any]:
        """Run a call in a worker."""
        return self._pool.submit(function, *arguments, **named)

    def has_died(self, error: BaseException) -> bool:
        """Return whether a call failed because a worker died: then all of them are gone."""
        return isinstance(error, BrokenProcessPool)

    def explained(self, error: BaseException) -> BaseException:
        """Return what to raise where a call failed otherwise."""
        return error

    def renew(self, jobs: int) -> None:
        """Replace the workers by `jobs` others.

        Raises:
            InternalError: none starts.
        """
        for _ in range(_FALSE_STARTS):
            self.kill()
            self._pool = _pool_of(jobs)
            try:
                self._pool.submit(_nothing).result()
            except BrokenProcessPool:
                continue
            return
        raise InternalError("worker processes do not start")

    def kill(self) -> None:
        """End all workers at once."""
        for process in list((self._pool._processes or {}).values()):  # there is no public way
            process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the workers end when they have nothing to do."""
        self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)


def _pool_of(jobs: int) -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)
    # Workers inherit the mask, so that a Ctrl-C while they import reaches this process only.
    with _interrupts_held():
        for _ in range(jobs):
            pool.submit(_nothing)
    return pool


@contextlib.contextmanager
def local_processes(jobs: int) -> Iterator[LocalPool | None]:
    """Provide an executor of `jobs` worker processes; None for one job, which runs in this process.

    The workers ignore Ctrl-C, are killed when the block is left by an exception, and end when this process does.
    """
    if jobs <= 1:
        yield None
        return
    pool = LocalPool(jobs)
    try:
        yield pool
    except BaseException:
        pool.kill()
        raise
    pool.shutdown(wait=True)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _nothing() -> None:
    return
