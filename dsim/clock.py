"""The simulation clock: a SimPy environment whose events are ordered within one instant."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final, cast

import simpy

#: Order of what happens at one instant (docs/semantics.md, section 2).
STEP_END: Final = 1
TRANSFER_END: Final = 2
ARRIVAL: Final = 3


class Wake(simpy.Event):
    """An event that happens by itself at set instants.

    Triggered at birth, as `simpy.Timeout` is; what never differs between wakes is kept on the class, for speed. Unlike
    other events it may be scheduled again: what happens once per step of an instance is one wake for the whole run.
    """

    _value = None
    _ok = True
    _defused = False

    def __init__(self, callback: Callable[[simpy.Event], None]) -> None:
        self.callback = callback
        self.callbacks = [callback]


class Clock(simpy.Environment):
    """SimPy's environment with absolute instants.

    `Environment.schedule` takes a delay, and now + (t - now) can miss t by a rounding error, which would break ties
    between events that are meant for the same instant.
    """

    def __init__(self) -> None:
        #: The present instant: `now`, without the cost of a property.
        self.now_s = 0.0
        super().__init__()
        #: The event queue itself, the next event first; to be looked at only.
        self.pending = cast(list[tuple[float, int, int, Wake]], self._queue)

    @property
    def _now(self) -> float:
        return self.now_s

    @_now.setter
    def _now(self, now_s: float) -> None:
        self.now_s = float(now_s)

    def at(self, time_s: float, order: int, callback: Callable[[simpy.Event], None]) -> None:
        """Schedule `callback` for the instant `time_s` (>= now).

        Args:
            order: `STEP_END`, `TRANSFER_END` or `ARRIVAL`.
        """
        heappush(self.pending, (time_s, order, next(self._eid), Wake(callback)))

    def wake(self, time_s: float, order: int, wake: Wake) -> None:
        """Schedule a wake that is at hand; otherwise as `at`."""
        heappush(self.pending, (time_s, order, next(self._eid), wake))

    def step(self) -> None:
        """Let the next event happen; a wake keeps its callback."""
        self.now_s, _, _, event = heappop(self.pending)
        event.callback(event)

    def scheduled(self) -> int:
        """Return how many events were ever scheduled; to be asked once, at the end."""
        return next(self._eid)

    @property
    def quiet(self) -> bool:
        """Whether nothing else is scheduled for this instant; alarms that are not set for it any more are dropped."""
        queue, now_s = self.pending, self.now_s
        while queue and queue[0][0] <= now_s:
            event = queue[0][3]
            if not isinstance(event, Alarm) or event.time_s == now_s:
                return False
            heappop(queue)
        return True


class Alarm(Wake):
    """The one next instant at which an instance wakes by itself.

    An instant that was set and is not valid any more stays in the event queue: `rings` tells it from the valid one.
    """

    def __init__(self, clock: Clock, callback: Callable[[simpy.Event], None]) -> None:
        super().__init__(callback)
        self.clock = clock
        #: When it will wake; infinite if never.
        self.time_s = math.inf

    def set(self, time_s: float) -> None:
        """Wake at `time_s`, as the end of a step, and not at the instant set before; never if it is infinite."""
        if time_s != self.time_s:
            self.time_s = time_s
            if time_s != math.inf:
                clock = self.clock
                heappush(clock.pending, (time_s, STEP_END, next(clock._eid), self))

    def rings(self) -> bool:
        """Whether this is the instant that was set; it is not set any more then. To be asked first by the callback."""
        if self.time_s != self.clock.now_s:
            return False
        self.time_s = math.inf
        return True
