"""Runner: probes through any executor, in an order that does not depend on it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import Protocol

from placement.probe import Outcome, Probe, Scenario, run_probe


class Progress(Protocol):
    """Hears how far a search is."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Hear that `done` of the `total` probes known so far are finished."""
        ...


class Runner:
    """Runs batches of probes; outcomes come in the order of the probes, whoever ran them.

    Args:
        executor: where probes run; None: here, one after the other.
    """

    def __init__(
        self, scenario: Scenario, *, executor: Executor | None = None, progress: Progress | None = None
    ) -> None:
        self.scenario = scenario
        self._executor = executor
        self._progress = progress
        self.probes = 0
        self.requests = 0

    def run(self, probes: Sequence[Probe], *, stage: str) -> list[Outcome]:
        """Return the outcome of every probe."""
        total = self.probes + len(probes)
        outcomes = []
        for outcome in self._outcomes(probes):
            outcomes.append(outcome)
            self.probes += 1
            self.requests += outcome.observation.requests
            if self._progress is not None:
                self._progress(stage, self.probes, total)
        return outcomes

    def _outcomes(self, probes: Sequence[Probe]) -> Iterator[Outcome]:
        if self._executor is None:
            for probe in probes:
                yield run_probe(self.scenario, probe)
            return
        futures = [self._executor.submit(run_probe, self.scenario, probe) for probe in probes]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


@contextlib.contextmanager
def local_processes(jobs: int) -> Iterator[Executor | None]:
    """Provide an executor of `jobs` worker processes; None for one job, which runs in this process.

    The workers ignore Ctrl-C, are killed when the block is left by an exception, and end when this process does.
    """
    if jobs <= 1:
        yield None
        return
    executor = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)
    # Workers inherit the mask, so that a Ctrl-C while they import reaches this process only.
    with _interrupts_held():
        started = [executor.submit(_nothing) for _ in range(jobs)]
    try:
        yield executor
    except BaseException:
        for process in list((executor._processes or {}).values()):  # there is no public way
            process.kill()
        executor.shutdown(wait=True, cancel_futures=True)
        raise
    del started
    executor.shutdown(wait=True)


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
