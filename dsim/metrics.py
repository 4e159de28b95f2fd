"""Statistics over the columns of a run."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dsim.recorder import Gaps

QUANTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles (linear, as numpy's default) of a sample; NaN where it is empty."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Distribution:
        """Return the distribution of `values`, shape (n,), NaN left out."""
        known = values[~np.isnan(values)]
        if not len(known):
            return cls(*[math.nan] * 5)
        return cls(float(known.mean()), *(float(q) for q in np.quantile(known, QUANTILES)))

    def to_dict(self) -> dict[str, float]:
        """Return the five numbers by name."""
        return {name: getattr(self, name) for name in ("mean", "p50", "p90", "p95", "p99")}


def weighted_sum(values: NDArray[np.float64], weights: NDArray[Any]) -> float:
    """Return the sum of values times weights, both of shape (n,).

    Not as `np.dot`: a BLAS has every core work on long arrays, where its threads keep spinning for long after, and what
    rounding makes of the sum depends on their number.
    """
    return float(np.sum(values * weights))


def weighted_distribution(gaps: Gaps) -> Distribution:
    """Return the distribution of gaps between tokens, each counted as often as it occurred.

    The percentiles equal numpy's linear ones over the sample with every gap repeated `weight` times.
    """
    value, weight = gaps.expanded()
    total = int(weight.sum(dtype=np.int64))
    if not total:
        return Distribution.of(np.array([]))
    order = np.argsort(value, kind="stable")
    # One at a time, as millions of requests have tens of millions of gaps.
    value = value[order]
    weight = weight[order]
    del order
    upto = np.cumsum(weight, dtype=np.int64)
    quantiles = []
    for q in QUANTILES:
        place_q = q * (total - 1)
        low = math.floor(place_q)
        below, above = (
            float(value[np.searchsorted(upto, rank, side="right")]) for rank in (low, min(low + 1, total - 1))
        )
        quantiles.append(below + (above - below) * (place_q - low))
    return Distribution(weighted_sum(value, weight) / total, *quantiles)


class Saturation(enum.Enum):
    """How close to its capacity a deployment ran."""

    STABLE = "stable"
    NEAR_KNEE = "near_knee"
    OVERLOADED = "overloaded"


#: Stretches of arrivals over which the growth of the backlog is tested, after the first tenth is dropped.
_STRETCHES = 20
#: Mean growth in its standard errors above which it is taken as real.
_GROWTH_ERRORS = 1.0
#: Backlog growth as a share of the arrivals meanwhile below which nothing is concluded from this many arrivals; with
#: more of them it falls with the root of their number, since the swings of a stable backlog do not grow with the run.
_GROWTH_SHARE, _GROWTH_ARRIVALS = 0.02, 1000
#: Part of that share asked of the second half alone, so that a backlog that only fills up (a closed loop's first wave)
#: does not count.
_LATE_GROWTH = 0.5
#: Waits per service from which on a deployment is near its knee; 3 is a load of 6/7 in an M/D/1 queue.
_KNEE_WAITS = 3.0


def backlog(columns: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
    """Return how many requests wait, for prefill or for decode, just after each arrival, shape (n,).

    Requests in a batch do not wait. Under a rate that cannot be sustained this number grows without bound, whatever
    the run length; a run that drains afterwards does not hide it.
    """
    arrival = columns["arrival_s"]

    def upto(values: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.searchsorted(np.sort(_known(values)), arrival, side="right")

    begins, ends = waits(columns)
    return np.maximum(0, sum(map(upto, begins)) - sum(map(upto, ends)))


def waits(
    columns: Mapping[str, NDArray[Any]],
) -> tuple[tuple[NDArray[np.float64], ...], tuple[NDArray[np.float64], ...]]:
    """Return when each request begins to wait, for prefill and for decode, and when that ends; NaN where never."""
    to_decode = ~np.isnan(columns["transfer_start_s"]) | ~np.isnan(columns["decode_start_s"])
    never_prefilled = np.isnan(columns["prefill_start_s"])
    moved_on = np.where(to_decode & ~never_prefilled, columns["prefill_end_s"], np.nan)
    arrived = np.where(columns["rejected"], np.nan, columns["arrival_s"])
    return (arrived, moved_on), (columns["prefill_start_s"], columns["decode_start_s"])


def saturation_of(columns: Mapping[str, NDArray[Any]], counted: slice) -> Saturation:
    """Classify a run by the growth of its backlog over the arrivals up to the last counted one.

    Overloaded: the backlog grows by more than 2 % of the arrivals (of n > 1000 arrivals: 2 % * sqrt(1000 / n)), in the
    second half still by half that share, and the mean growth over twenty stretches of arrivals exceeds its standard
    error. A backlog that returns to where it was has growths
    that cancel, so that their mean is far below what their scatter would let an undirected walk reach: hence a low bar
    suffices. Measured with M/D/1 queues, share of 300 (1000) requests called overloaded: at 0.7 of the capacity 0.1 %
    (0), at 0.9 4 % (1 %), at 1.05 50 % (70 %), at 1.2 96 % (100 %). Arrivals three times as irregular as Poisson's need
    longer runs: 63 % at 1.2, 3 % at 0.7 with 300 requests.

    Near the knee: otherwise, if the mean wait, for prefill and decode, exceeds three times prefill and one token.
    """
    n = counted.stop
    judged, marks = backlog_marks(counted)
    if not len(marks):
        return Saturation.STABLE
    upto = {name: values[:n] for name, values in columns.items()}
    part = {name: values[judged] for name, values in upto.items()}
    sums = [(float(known.sum()), len(known)) for known in map(_known, times_of(part))]
    return saturation_from(backlog(upto)[marks], judged, sums)


def backlog_marks(counted: slice) -> tuple[slice, NDArray[np.int64]]:
    """Return the requests that tell about saturation, and the arrivals that mark the stretches of the backlog.

    There are no marks where the requests are too few.
    """
    n = counted.stop
    first = max(counted.start, n // 10)
    marks = first + np.linspace(0, n - first - 1, _STRETCHES + 1).round().astype(np.int64)
    return slice(first, n), marks if n - first >= _STRETCHES else marks[:0]


def times_of(columns: Mapping[str, NDArray[Any]]) -> tuple[NDArray[np.float64], ...]:
    """Return prefill, wait for prefill, wait for decode, and time per token of each request, seconds, shape (n,)."""
    prefill_end_s = columns["prefill_end_s"]
    # A layer-wise transfer starts before its prefill ends.
    transfer_s = columns["transfer_end_s"] - np.maximum(columns["transfer_start_s"], prefill_end_s)
    later = np.maximum(columns["output_tokens"] - 1, 1)
    return (
        prefill_end_s - columns["prefill_start_s"],
        columns["prefill_start_s"] - columns["arrival_s"],
        columns["decode_start_s"] - prefill_end_s - np.nan_to_num(transfer_s),
        (columns["last_token_s"] - columns["first_token_s"]) / later,
    )


def saturation_from(waiting: NDArray[np.int64], judged: slice, sums: Sequence[tuple[float, int]]) -> Saturation:
    """Classify a run (see `saturation_of`).

    Args:
        waiting: backlog at the marks.
        judged: the requests that tell about saturation.
        sums: sum and count of each of the `times_of` these, where known.
    """
    if _grows(waiting, judged.stop - judged.start):
        return Saturation.OVERLOADED
    (_, served), *_ = sums
    if not served:
        # Nothing was served: all rejected, or a run that stopped before.
        return Saturation.OVERLOADED
    prefill_s, prefill_wait_s, decode_wait_s, token_s = (total / count if count else 0.0 for total, count in sums)
    near = prefill_wait_s + decode_wait_s > _KNEE_WAITS * (prefill_s + token_s)
    return Saturation.NEAR_KNEE if near else Saturation.STABLE


def _grows(marks: NDArray[np.int64], requests: int) -> bool:
    """Whether a backlog grows over as many arrivals, of which the marks are evenly spread."""
    growth = np.diff(marks).astype(np.float64)
    arrivals = requests / _STRETCHES
    half = growth[_STRETCHES // 2 :]
    least = _GROWTH_SHARE * math.sqrt(min(1.0, _GROWTH_ARRIVALS / requests)) * arrivals
    if growth.mean() <= least or half.mean() <= _LATE_GROWTH * least:
        return False
    return bool(growth.mean() > _GROWTH_ERRORS * growth.std(ddof=1) / math.sqrt(_STRETCHES))


def _known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[~np.isnan(values)]
