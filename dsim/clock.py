"""The simulation clock: a SimPy environment whose events are ordered within one instant."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import Final

import simpy
from simpy.core import Infinity


#: Order of what happens at one instant (docs/semantics.md, section 2).
STEP_END: Final = 1
TRANSFER_END: Final = 2
ARRIVAL: Final = 3


class Wake(simpy.Event):
    """An event that happens by itself at a set instant and can be called off until then.

    Triggered at birth, as `simpy.Timeout` is; what never differs between wakes is kept on the class, for speed.
    """

    _value = None
    _ok = True
    _defused = False

    def __init__(self, callback: Callable[[simpy.Event], None]) -> None:
        self.callbacks = [callback]

    def cancel(self) -> None:
        """Let nothing happen when the instant comes; a no-op afterwards."""
        if self.callbacks:
            self.callbacks.clear()


class Clock(simpy.Environment):
    """SimPy's environment with absolute instants.

    `Environment.schedule` takes a delay, and now + (t - now) can miss t by a rounding error, which would break ties
    between events that are meant for the same instant.
    """

    def at(self, time_s: float, order: int, callback: Callable[[simpy.Event], None]) -> Wake:
        """Schedule `callback` for the instant `time_s` (>= now) and return the event.

        Args:
            order: `STEP_END`, `TRANSFER_END` or `ARRIVAL`.
        """
        wake = Wake(callback)
        heappush(self._queue, (time_s, order, next(self._eid), wake))
        return wake

    def scheduled(self) -> int:
        """Return how many events were ever scheduled; to be asked once, at the end."""
        return next(self._eid)

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
