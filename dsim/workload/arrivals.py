"""When requests arrive: endless processes drawn at unit rate and scaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dsim.errors import InputError

CHUNK: Final = 4096
"""Requests are always drawn in chunks of this size, so that no caller's block size changes what is drawn."""

Times = NDArray[np.float64]


class Arrivals(Protocol):
    """An arrival process."""

    @property
    def native_rate_per_s(self) -> float | None:
        """The rate it has by itself (a replayed trace), or None where a rate must be given."""
        ...

    def times(self, rng: np.random.Generator, *, rate_per_s: float | None) -> Iterator[Times]:
        """Yield arrival times, s, endlessly in chunks of `CHUNK`, non-decreasing.

        The times at rate r are those at rate 1 divided by r, for the same generator state.
        """
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Poisson arrivals: independent exponential gaps."""

    @property
    def native_rate_per_s(self) -> None:
        """None: a rate must be given."""
        return None

    def times(self, rng: np.random.Generator, *, rate_per_s: float | None) -> Iterator[Times]:
        """Yield arrival times, s; see `Arrivals.times`."""
        return _renewals(lambda: rng.standard_exponential(CHUNK), rate_per_s)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gamma-distributed gaps.

    Args:
        cv: standard deviation of a gap divided by its mean, > 0; 1 is Poisson, above 1 is bursty.
    """

    cv: float

    def __post_init__(self) -> None:
        if not 0.01 <= self.cv <= 100:
            raise InputError(
                "arrivals", "must be between 0.01 and 100", name="cv", value=self.cv, hint="as in gamma:cv=2"
            )

    @property
    def native_rate_per_s(self) -> None:
        """None: a rate must be given."""
        return None

    def times(self, rng: np.random.Generator, *, rate_per_s: float | None) -> Iterator[Times]:
        """Yield arrival times, s; see `Arrivals.times`."""
        shape = self.cv**-2
        return _renewals(lambda: rng.standard_gamma(shape, CHUNK) / shape, rate_per_s)


@dataclass(frozen=True, slots=True)
class Constant:
    """Equal gaps of 1/rate; the first request arrives after one of them."""

    @property
    def native_rate_per_s(self) -> None:
        """None: a rate must be given."""
        return None

    def times(self, rng: np.random.Generator, *, rate_per_s: float | None) -> Iterator[Times]:
        """Yield arrival times, s; see `Arrivals.times`."""
        del rng
        return _renewals(lambda: np.ones(CHUNK), rate_per_s)


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """The arrival times of a trace, repeated when they run out.

    Between the last time and the repeated first one lies one mean gap, so that the rate stays the trace's own.
    Without a rate the times are those of the trace, exactly.

    Args:
        arrival_s: shape (n,), n >= 2, finite, >= 0, non-decreasing, not all equal.
        source: where the times come from, for messages.
    """

    arrival_s: Times
    source: str = "trace"

    def __post_init__(self) -> None:
        times = self.arrival_s
        if len(times) < 2:
            raise InputError(self.source, "must hold at least 2 arrivals to be replayed", value=len(times))
        if not np.all(np.isfinite(times)) or times[0] < 0 or np.any(np.diff(times) < 0):
            raise InputError(self.source, "must be finite, >= 0 and non-decreasing", name="arrival_s")
        if times[-1] <= times[0]:
            raise InputError(self.source, "must not all be equal", name="arrival_s", value=float(times[0]))

    @property
    def native_rate_per_s(self) -> float:
        """Arrivals per second of the trace: gaps over the time they span."""
        return float((len(self.arrival_s) - 1) / (self.arrival_s[-1] - self.arrival_s[0]))

    def times(self, rng: np.random.Generator, *, rate_per_s: float | None) -> Iterator[Times]:
        """Yield arrival times, s; see `Arrivals.times`. Without a rate: the trace's own times."""
        del rng
        if rate_per_s is not None:
            _check_rate(rate_per_s)
        return self._times(rate_per_s)

    def _times(self, rate_per_s: float | None) -> Iterator[Times]:
        count, native = len(self.arrival_s), self.native_rate_per_s
        period_s = float(self.arrival_s[-1] - self.arrival_s[0]) + 1 / native
        first = 0
        while True:
            cycle, row = np.divmod(np.arange(first, first + CHUNK), count)
            times: Times = self.arrival_s[row] + cycle * period_s
            yield times if rate_per_s is None else times * native / rate_per_s
            first += CHUNK


def _renewals(gaps: Callable[[], Times], rate_per_s: float | None) -> Iterator[Times]:
    if rate_per_s is None:
        raise InputError("rate", "must be given", hint="only replayed arrivals have a rate of their own")
    _check_rate(rate_per_s)
    return _cumulated(gaps, rate_per_s)


def _cumulated(gaps: Callable[[], Times], rate_per_s: float) -> Iterator[Times]:
    elapsed = 0.0
    while True:
        unit = gaps()
        unit[0] += elapsed
        # numpy's cumsum adds from left to right, so carrying the sum over gives the bits of one long cumsum.
        np.cumsum(unit, out=unit)
        elapsed = float(unit[-1])
        yield unit / rate_per_s


def _check_rate(rate_per_s: float) -> None:
    if not (math.isfinite(rate_per_s) and 1e-9 <= rate_per_s <= 1e9):
        raise InputError("rate", "must be between 1e-9 and 1e9 requests per second", value=rate_per_s)
