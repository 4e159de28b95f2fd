"""Intervals from few replications, or from stretches of them: Student's t, and control variates."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate between its lower and upper confidence limit."""

    low: float
    best: float
    high: float

    def __truediv__(self, divisor: float) -> Interval:
        return Interval(self.low / divisor, self.best / divisor, self.high / divisor)

    def __mul__(self, factor: float) -> Interval:
        return Interval(self.low * factor, self.best * factor, self.high * factor)

    @property
    def half_width(self) -> float:
        """Half of the width relative to the best estimate; infinite around 0."""
        return (self.high - self.low) / (2 * self.best) if self.best > 0 else math.inf

    def to_dict(self) -> dict[str, float]:
        """Return low, best and high."""
        return {"low": self.low, "best": self.best, "high": self.high}


@functools.cache
def student_t(confidence: float, degrees: int) -> float:
    """Return the two-sided quantile of Student's t with a whole number of degrees of freedom.

    >>> round(student_t(0.95, 7), 3)
    2.365

    Source:
        Abramowitz and Stegun, 26.7.3 and 26.7.4: the distribution as a finite sum.
    """
    low, high = 0.0, 1.0
    while _inside(high, degrees) < confidence:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, degrees) < confidence else (low, middle)
    return high


def _inside(t: float, degrees: int) -> float:
    """Return P(|T| <= t)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine2 = math.cos(angle) ** 2
    odd = degrees % 2
    term, total = 1.0, 0.0
    for i in range(1 + odd, degrees, 2):
        total += term
        term *= cosine2 * i / (i + 1)
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)


def mean_interval(values: Sequence[float], *, confidence: float) -> Interval:
    """Return the mean of independent values and its t interval; infinite limits for fewer than two."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(-math.inf, mean, math.inf)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = student_t(confidence, len(values) - 1) * error
    return Interval(mean - half, mean, mean + half)


def stretches(values: NDArray[np.float64] | NDArray[np.bool_], parts: int) -> Floats:
    """Return the means of successive stretches of equal length, shape (parts,); what is left at the end is not in them.

    >>> stretches(np.array([1.0, 2.0, 3.0, 4.0, 9.0]), 2).tolist()
    [1.5, 3.5]
    """
    length = len(values) // parts
    means: Floats = values[: parts * length].reshape(parts, length).mean(axis=1)
    return means


@dataclass(frozen=True, slots=True, eq=False)
class Controls:
    """What is known of the requests of each replication beside how they fared.

    Args:
        of: by replication, each stretch's departures from what is usual, shape (stretches, k).
        covariance: of the error of what is taken as usual, shape (k, k).
    """

    of: Callable[[int], Floats]
    covariance: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The mean of stretches, corrected for controls.

    Args:
        error: its standard error.
        degrees: degrees of freedom of that.
        values: the stretches, corrected.
        correlation: of what is left of neighbouring stretches.
        shift_error: the part of the error that what is taken as usual adds.
    """

    best: float
    error: float
    degrees: int
    values: Floats
    correlation: float
    shift_error: float = 0.0

    def half_width(self, confidence: float) -> float:
        """Return half the width of its interval."""
        return student_t(confidence, self.degrees) * self.error if self.degrees > 0 else math.inf


def level(
    values: Floats,
    *,
    runs: int,
    controls: Floats | None = None,
    covariance: Floats | None = None,
    repeated: bool = False,
) -> Level:
    """Return the mean of the stretches of some runs at the usual traffic.

    Args:
        values: shape (n,), run after run.
        controls: departures of each stretch from what is usual, shape (n, k); None: none are known.
        covariance: of the error of what is taken as usual.
        repeated: every run's second half stands for its first one, too, so that only half of the stretches are known.
    """
    n, k = len(values), 0 if controls is None else controls.shape[1]
    shift, slopes = 0.0, np.zeros(k)
    spread = np.array([]) if controls is None else controls.std(axis=0)
    used = np.array([], dtype=np.intp)
    if controls is not None:
        used = np.flatnonzero(spread > 1e-9 * (1 + np.abs(controls).max(initial=0.0)))
    known = n // 2 if repeated else n
    design = np.ones((n, 1))
    if controls is not None and known - len(used) - 1 >= _LEAST_DEGREES:
        design = np.column_stack([design, controls[:, used] / spread[used]])
    fit, *_ = np.linalg.lstsq(design, values, rcond=None)
    rest = values - design @ fit
    if controls is not None and design.shape[1] > 1:
        slopes[used] = fit[1:] / spread[used]
        if covariance is not None:
            shift = float(slopes @ covariance @ slopes)
    degrees = known - design.shape[1]
    share = float(np.linalg.pinv(design.T @ design)[0, 0]) * n / known
    by_run = rest.reshape(runs, -1)
    if repeated:
        by_run = by_run[:, by_run.shape[1] // 2 :]
    correlation = _neighbours(by_run, design.shape[1])
    variance = float(by_run.ravel() @ by_run.ravel()) / max(degrees, 1)
    # As much as neighbours resemble each other more than chance explains there are fewer of them.
    alike = (1 + correlation) / (1 - correlation)
    square = variance * share * alike
    if runs >= _TELLING:
        # Where whole runs lie further apart than their stretches say, they know better.
        square = max(square, float(by_run.mean(axis=1).var(ddof=1)) / runs)
    error = math.sqrt(square + shift)
    degrees = max(1, math.floor(known / alike) - design.shape[1])
    corrected = values if controls is None else values - controls @ slopes
    return Level(float(fit[0]), error, degrees, corrected, correlation, math.sqrt(shift))


#: Runs that say themselves how far apart they lie.
_TELLING = 3
#: Degrees of freedom that controls must leave.
_LEAST_DEGREES = 4
#: Correlation of neighbours at most that is allowed for; with more, stretches say little.
_MOST_CORRELATION = 0.9


def _neighbours(by_run: Floats, fitted: int) -> float:
    """Return the correlation of neighbouring values within rows, 0 where it is not above 0.

    Args:
        fitted: parameters that were fitted to all values: each lowers the correlation by one part in their number.
    """
    total, count = float((by_run**2).sum()), by_run.shape[1]
    if total <= 0 or count < 4:
        return 0.0
    product = float((by_run[:, 1:] * by_run[:, :-1]).sum()) / total * count / (count - 1)
    return float(min(max(product + fitted / by_run.size, 0.0), _MOST_CORRELATION))
