"""Cruises: many decode steps of a constant batch at once."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsim.latency import HostOverhead, LatencyModel

#: Steps that a cruise over a latency model without a closed form evaluates at once.
_CHUNK_STEPS = 512


class Cruise(Protocol):
    """End instants of the steps 1, 2, ... of one batch that nothing disturbs."""

    start_s: float

    @property
    def limit(self) -> int:
        """Most steps this cruise can tell about."""
        ...

    def end_s(self, steps: int) -> float:
        """Instant at which step number `steps` ends; `start_s` for 0."""
        ...

    def gaps(self, steps: int) -> tuple[float, float]:
        """Duration of the first step and, where all later ones grow by a constant, that constant; NaN otherwise."""
        ...


class AffineCruise:
    """Steps that take a, a + d, a + 2d, ... seconds: an arithmetic series."""

    __slots__ = ("_first_s", "_half_s", "start_s")

    #: None: more steps than any batch takes.
    limit = 1 << 62

    def __init__(self, start_s: float, first_s: float, growth_s: float) -> None:
        self.start_s = start_s
        self._first_s = first_s
        self._half_s = 0.5 * growth_s

    def end_s(self, steps: int) -> float:
        """Instant at which step number `steps` ends."""
        return self.start_s + (self._first_s * steps + self._half_s * (steps * (steps - 1)))

    def gaps(self, steps: int) -> tuple[float, float]:
        """Duration of the first step and growth per step, seconds."""
        return self._first_s, 2.0 * self._half_s

    def steps_until(self, time_s: float) -> int:
        """Smallest number of steps whose end is not before `time_s` (> start)."""
        start_s, first_s, half_s = self.start_s, self._first_s, self._half_s
        span = time_s - start_s
        if half_s > 0.0:
            linear = first_s - half_s
            guess = (math.sqrt(linear * linear + 4.0 * half_s * span) - linear) / (2.0 * half_s)
        else:
            guess = span / first_s
        steps = math.ceil(guess)
        if steps < 1:
            steps = 1
        # The closed form is inexact in the last digits; the definition decides. The sums are those of `end_s`.
        while steps > 1 and start_s + (first_s * (steps - 1) + half_s * ((steps - 1) * (steps - 2))) >= time_s:
            steps -= 1
        while start_s + (first_s * steps + half_s * (steps * (steps - 1))) < time_s:
            steps += 1
        return steps


class TableCruise:
    """Steps whose times a latency model lists one by one."""

    __slots__ = ("_ends_s", "_steps_s", "start_s")

    def __init__(self, start_s: float, steps_s: NDArray[np.float64]) -> None:
        self.start_s = start_s
        self._steps_s = steps_s
        self._ends_s = start_s + np.cumsum(steps_s)

    @property
    def limit(self) -> int:
        """As many steps as were listed."""
        return len(self._steps_s)

    def end_s(self, steps: int) -> float:
        """Instant at which step number `steps` ends."""
        return float(self._ends_s[steps - 1]) if steps else self.start_s

    def gaps(self, steps: int) -> tuple[float, float]:
        """Duration of the first step; the rest follows no rule."""
        return float(self._steps_s[0]), math.nan

    def steps_until(self, time_s: float) -> int:
        """Smallest number of steps whose end is not before `time_s` (> start)."""
        return int(np.searchsorted(self._ends_s, time_s, side="left")) + 1


class Courses:
    """Starts cruises of one instance; remembers the lines of the batch sizes it has seen."""

    __slots__ = ("_host", "_latency", "_lines")

    def __init__(self, latency: LatencyModel, host: HostOverhead) -> None:
        self._latency = latency
        self._host = host
        self._lines: dict[int, tuple[float, float] | None] = {}

    def start(self, start_s: float, requests: int, context: int) -> AffineCruise | TableCruise:
        """Return the steps of a batch of `requests` whose first step has `context` tokens, host overhead included."""
        try:
            line = self._lines[requests]
        except KeyError:
            line = self._lines[requests] = self._line(requests)
        if line is not None:
            return AffineCruise(start_s, line[0] + line[1] * context, line[1] * requests)
        host = self._host
        steps_s = self._latency.decode_run_s(requests, context, _CHUNK_STEPS)
        contexts = context + requests * np.arange(_CHUNK_STEPS, dtype=np.float64)
        return TableCruise(start_s, steps_s + (host.step_s + host.sequence_s * requests) + host.token_s * contexts)

    def _line(self, requests: int) -> tuple[float, float] | None:
        line, host = self._latency.decode_line(requests), self._host
        if line is None:
            return None
        return line[0] + host.step_s + host.sequence_s * requests, line[1] + host.token_s
