"""Sketches: statistics of any number of values in a fixed memory."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dsim.metrics import QUANTILES, Distribution, weighted_sum

#: Largest relative error of a sketch's percentiles.
RELATIVE_ERROR: Final = 0.001

#: Values of one bin differ by this factor at most; a little less than the error allows, for rounding.
_RATIO: Final = (1 + 0.999 * RELATIVE_ERROR) / (1 - 0.999 * RELATIVE_ERROR)
_LOG_RATIO: Final = math.log(_RATIO)
#: Smaller values count as 0, larger ones as this.
_SMALLEST, _LARGEST = 1e-9, 1e12
_FIRST: Final = math.ceil(math.log(_SMALLEST) / _LOG_RATIO)
_BINS: Final = math.ceil(math.log(_LARGEST) / _LOG_RATIO) - _FIRST + 1


class Sketch:
    """Mean and percentiles of values >= 0, of which only counts in bins of equal ratio are kept.

    The mean is exact (to rounding). A percentile differs from the linear one of the values themselves by at most
    `RELATIVE_ERROR` of it, for values from 1e-9 to 1e12.
    """

    __slots__ = ("_bins", "_count", "_largest", "_smallest", "_sum", "_zeros")

    def __init__(self) -> None:
        self._bins = np.zeros(_BINS, dtype=np.int64)
        self._zeros = 0
        self._count = 0
        self._sum = 0.0
        self._smallest = math.inf
        self._largest = 0.0

    def add(self, values: NDArray[np.float64], weights: NDArray[np.integer[Any]] | None = None) -> None:
        """Count values, NaN left out.

        Args:
            values: shape (n,).
            weights: shape (n,), how often each occurred; once if not given.
        """
        known = ~np.isnan(values)
        values = values[known]
        if not len(values):
            return
        weights = np.ones(len(values), dtype=np.int64) if weights is None else weights[known]
        self._sum += weighted_sum(values, weights)
        self._count += int(weights.sum(dtype=np.int64))
        self._smallest = min(self._smallest, float(values.min()))
        self._largest = max(self._largest, float(values.max()))
        small = values < _SMALLEST
        self._zeros += int(weights[small].sum(dtype=np.int64))
        places = np.ceil(np.log(np.clip(values[~small], None, _LARGEST)) / _LOG_RATIO).astype(np.int64) - _FIRST
        # Whole numbers are added exactly below 2**53.
        self._bins += np.bincount(places, weights=weights[~small], minlength=_BINS).astype(np.int64)

    def distribution(self) -> Distribution:
        """Return mean and percentiles; NaN where nothing was counted."""
        if not self._count:
            return Distribution(*[math.nan] * 5)
        upto = self._zeros + np.cumsum(self._bins)
        quantiles = []
        for share in QUANTILES:
            place = share * (self._count - 1)
            low = math.floor(place)
            below, above = (self._value(upto, rank) for rank in (low, min(low + 1, self._count - 1)))
            quantiles.append(below + (above - below) * (place - low))
        return Distribution(self._sum / self._count, *quantiles)

    def _value(self, upto: NDArray[np.int64], rank: int) -> float:
        """Return about the value of a rank, counted from 0."""
        if rank < self._zeros:
            return min(self._smallest, _SMALLEST)
        place = int(np.searchsorted(upto, rank, side="right")) + _FIRST
        # The values of a bin are above ratio ** (place - 1) and at most ratio ** place.
        middle = 2 * math.exp(place * _LOG_RATIO) / (_RATIO + 1)
        return min(max(middle, self._smallest), self._largest)
