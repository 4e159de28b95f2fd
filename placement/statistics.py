"""Intervals from few replications: Student's t, and paired comparisons."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
