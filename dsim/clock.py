"""The simulation clock: a SimPy environment whose events are ordered within one instant."""

from __future__ import annotations

import enum
from collections.abc import Callable
from heapq import heappush

import simpy
from simpy.core import Infinity


class Phase(enum.IntEnum):
    """Order of what happens at one instant (docs/semantics.md, section 2)."""

    STEP_END = 1
    TRANSFER_END = 2
    ARRIVAL = 3


class Wake(simpy.Event):
    """An event that happens by itself at a set instant and can be called off until then."""

    def __init__(self, clock: Clock, callback: Callable[[simpy.Event], None]) -> None:
        # As simpy.Timeout does: triggered at birth, so nothing of Event.__init__ is needed.
        self.env = clock
        self.callbacks = [callback]
        self._value = None
        self._ok = True
        self._defused = False

    def cancel(self) -> None:
        """Let nothing happen when the instant comes; a no-op afterwards."""
        if self.callbacks:
            self.callbacks.clear()


class Clock(simpy.Environment):
    """SimPy's environment with absolute instants.

    `Environment.schedule` takes a delay, and now + (t - now) can miss t by a rounding error, which would break ties
    between events that are meant for the same instant. `events` counts what was scheduled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events = 0

    def at(self, time_s: float, phase: Phase, callback: Callable[[simpy.Event], None]) -> Wake:
        """Schedule `callback` for the instant `time_s` (>= now) and return the event."""
        wake = Wake(self, callback)
        self.events += 1
        heappush(self._queue, (time_s, phase, next(self._eid), wake))
        return wake

    @property
    def pending(self) -> list[tuple[float, int, int, simpy.Event]]:
        """The event queue itself, to be looked at only."""
        return self._queue  # type: ignore[return-value]

    @property
    def quiet(self) -> bool:
        """Whether nothing else is scheduled for this instant."""
        queue = self._queue
        return not queue or queue[0][0] > self._now

    @property
    def next_event_s(self) -> float:
        """Instant of the next event; infinite if there is none."""
        queue = self._queue
        return float(queue[0][0]) if queue else Infinity
