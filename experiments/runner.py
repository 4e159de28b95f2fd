"""Runner of sweeps: tasks in worker processes, rows in the order of the tasks, deaths of workers included."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsim.errors import DsimError, InternalError
from experiments.measures import measure
from experiments.settings import Setting
from experiments.store import Row
from experiments.sweepfile import Task
from placement.runner import local_processes

#: Finished tasks that wait for an earlier one, for each process: a slow task does not stop the others at once.
_AHEAD = 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one task.

    Args:
        outputs: what was measured; empty if it failed.
        error: why it failed, on one line; None if it did not.
    """

    outputs: dict[str, Any]
    error: str | None = None


def run_task(setting: Setting, seed: int) -> Outcome:
    """Measure; whatever goes wrong is the task's outcome."""
    try:
        return Outcome(measure(setting, seed=seed))
    except Exception as error:  # noqa: BLE001 one task's failure, a bug's too, is a row and must not end the others
        return Outcome({}, _one_line(error))


def run_tasks(tasks: Sequence[Task], *, jobs: int) -> Generator[Row, None, None]:
    """Yield the row of every task, in their order.

    Args:
        jobs: worker processes; with 1, tasks run in this process.
    """
    if jobs == 1:
        for task in tasks:
            yield _row(task, run_task(task.setting, task.seed))
    else:
        yield from _Crew(tasks, jobs).rows()


@dataclass(slots=True)
class _Crew:
    """Worker processes and where each task is.

    When a process dies, every task in flight is a suspect. Suspects run again, one at a time; one that so kills its
    process runs once more, and has failed if it does it again.

    Args:
        first: the task whose row is next.
        killed: the suspect that has killed its process while it ran alone.
    """

    tasks: Sequence[Task]
    jobs: int
    first: int = 0
    waiting: deque[int] = field(default_factory=deque)
    suspects: deque[int] = field(default_factory=deque)
    flight: dict[Future[Outcome], int] = field(default_factory=dict)
    done: dict[int, Outcome] = field(default_factory=dict)
    killed: int | None = None
    false_starts: int = 0

    def __post_init__(self) -> None:
        self.waiting.extend(range(len(self.tasks)))

    def rows(self) -> Iterator[Row]:
        """Yield the rows in order."""
        while self.first < len(self.tasks):
            try:
                # Two at least: a task that kills its process must not run in this one.
                with local_processes(max(2, self.jobs)) as executor:
                    assert executor is not None
                    yield from self._finished(executor)
            except BrokenProcessPool:
                self._after_death()
            yield from self._in_order()

    def _finished(self, executor: Executor) -> Iterator[Row]:
        while self.waiting or self.suspects or self.flight:
            self._submit(executor)
            finished, _ = wait(self.flight, return_when=FIRST_COMPLETED)
            dead = False
            for future in finished:
                if isinstance(future.exception(), BrokenProcessPool):
                    dead = True
                    continue
                self._finish(self.flight.pop(future), future.result())
            yield from self._in_order()
            if dead:
                raise BrokenProcessPool

    def _submit(self, executor: Executor) -> None:
        while self.suspects or self.waiting:
            source = self.suspects or self.waiting
            number = source[0]
            room = not self.flight if self.suspects else len(self.flight) <= self.jobs
            if not room or (self.flight and number >= self.first + _AHEAD * self.jobs):
                return
            task = self.tasks[number]
            self.flight[executor.submit(run_task, task.setting, task.seed)] = number
            if self.suspects:
                return
            self.waiting.popleft()

    def _finish(self, number: int, outcome: Outcome) -> None:
        self.done[number] = outcome
        self.false_starts = 0
        if self.suspects and self.suspects[0] == number:
            self.suspects.popleft()

    def _after_death(self) -> None:
        """Find out whose fault it is that a process died."""
        if not self.flight:
            self.false_starts += 1
            if self.false_starts > 2:
                raise InternalError("worker processes do not start")
        elif not self.suspects:
            self.suspects.extend(sorted(self.flight.values()))
        elif self.killed != self.suspects[0]:
            self.killed = self.suspects[0]
        else:
            text = "its process was killed twice; is there enough memory?"
            self._finish(self.suspects[0], Outcome({}, text))
        self.flight.clear()

    def _in_order(self) -> Iterator[Row]:
        while self.first in self.done:
            outcome = self.done.pop(self.first)
            self.first += 1
            yield _row(self.tasks[self.first - 1], outcome)


def _row(task: Task, outcome: Outcome) -> Row:
    return Row(
        id=task.id,
        factors=task.factors,
        replication=task.replication,
        seed=task.seed,
        outputs=outcome.outputs,
        error=outcome.error,
        profiles=task.profiles,
    )


def _one_line(error: Exception) -> str:
    """Return what an error says; of one that is no user's, what it is and where it came from."""
    text = str(error)
    if not isinstance(error, DsimError):
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
