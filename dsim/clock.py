"""The simulation clock: a SimPy environment whose events are ordered within one instant."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappush
from typing import Final, cast

import simpy

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

    def __init__(self) -> None:
        super().__init__()
        #: The event queue itself, the next event first; to be looked at only.
        self.pending = cast(list[tuple[float, int, int, simpy.Event]], self._queue)

    def at(self, time_s: float, order: int, callback: Callable[[simpy.Event], None]) -> Wake:
        """Schedule `callback` for the instant `time_s` (>= now) and return the event.

        Args:
            order: `STEP_END`, `TRANSFER_END` or `ARRIVAL`.
        """
        wake = Wake(callback)
        heappush(self.pending, (time_s, order, next(self._eid), wake))
        return wake

    def scheduled(self) -> int:
        """Return how many events were ever scheduled; to be asked once, at the end."""
        return next(self._eid)

    @property
    def quiet(self) -> bool:
        """Whether nothing else is scheduled for this instant."""
        queue = self.pending
        return not queue or queue[0][0] > self._now


class Alarm:
    """The one next instant at which an instance wakes by itself."""

    __slots__ = ("_callback", "_clock", "_time_s", "_wake")

    def __init__(self, clock: Clock, callback: Callable[[simpy.Event], None]) -> None:
        self._clock = clock
        self._callback = callback
        self._wake: Wake | None = None
        self._time_s = math.inf

    def is_set_for(self, time_s: float) -> bool:
        """Whether it will wake at `time_s`."""
        return self._time_s == time_s and self._wake is not None and bool(self._wake.callbacks)

    def cancel(self) -> None:
        """Do not wake."""
        self.set(math.inf)

    def set(self, time_s: float) -> None:
        """Wake at `time_s`, as the end of a step, and not at the instant set before; never if it is infinite."""
        wake = self._wake
        if wake is not None:
            # A wake without callbacks has happened or was called off.
            if self._time_s == time_s and wake.callbacks:
                return
            wake.cancel()
        self._time_s = time_s
        self._wake = None if time_s == math.inf else self._clock.at(time_s, STEP_END, self._callback)
