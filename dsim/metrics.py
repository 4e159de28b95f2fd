"""Statistics over the columns of a run."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dsim.recorder import Gaps

_QUANTILES = (0.5, 0.9, 0.95, 0.99)


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
        return cls(float(known.mean()), *(float(q) for q in np.quantile(known, _QUANTILES)))

    def to_dict(self) -> dict[str, float]:
        """Return the five numbers by name."""
        return {name: getattr(self, name) for name in ("mean", "p50", "p90", "p95", "p99")}


def weighted_distribution(gaps: Gaps) -> Distribution:
    """Return the distribution of gaps between tokens, each counted as often as it occurred.

    The percentiles equal numpy's linear ones over the sample with every gap repeated `weight` times.
    """
    values = [np.array(gaps.gap_s, dtype=np.float64)]
    weights = [np.array(gaps.weight, dtype=np.int64)]
    steps = np.array(gaps.run_steps, dtype=np.int64)
    if len(steps):
        place = np.arange(int(steps.sum())) - np.repeat(np.cumsum(steps) - steps, steps)
        first_s, growth_s = np.array(gaps.run_first_s), np.array(gaps.run_growth_s)
        values.append(np.repeat(first_s, steps) + place * np.repeat(growth_s, steps))
        weights.append(np.repeat(np.array(gaps.run_weight, dtype=np.int64), steps))
    value, weight = np.concatenate(values), np.concatenate(weights)
    total = int(weight.sum())
    if not total:
        return Distribution.of(np.array([]))
    order = np.argsort(value, kind="stable")
    value, upto = value[order], np.cumsum(weight[order])
    quantiles = []
    for q in _QUANTILES:
        place_q = q * (total - 1)
        low = math.floor(place_q)
        below, above = (
            float(value[np.searchsorted(upto, rank, side="right")]) for rank in (low, min(low + 1, total - 1))
        )
        quantiles.append(below + (above - below) * (place_q - low))
    return Distribution(float(np.dot(value, weight[order]) / total), *quantiles)


class Saturation(enum.Enum):
    """How close to its capacity a deployment ran."""

    STABLE = "stable"
    NEAR_KNEE = "near_knee"
    OVERLOADED = "overloaded"


#: Batches of arrivals over which the trend of the backlog is tested, after the first fifth is dropped.
_TREND_BATCHES = 8
#: Mann-Kendall sums of eight batches without a trend exceed these with probability 0.7 % and 3 %.
_TREND_SURE, _TREND_LIKELY = 20, 16
#: Backlog growth as a share of the arrivals meanwhile: below the first nothing is concluded.
_GROWTH_OVERLOADED, _GROWTH_NEAR = 0.02, 0.01


def backlog(columns: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
    """Return how many requests wait, for prefill or for decode, just after each arrival, shape (n,).

    Requests in a batch do not wait. Under a rate that cannot be sustained this number grows without bound, whatever
    the run length; a run that drains afterwards does not hide it.
    """
    arrival = columns["arrival_s"]

    def upto(values: NDArray[np.float64]) -> NDArray[np.int64]:
        known = np.sort(values[~np.isnan(values)])
        return np.searchsorted(known, arrival, side="right")

    to_decode = ~np.isnan(columns["transfer_start_s"]) | ~np.isnan(columns["decode_start_s"])
    never_prefilled = np.isnan(columns["prefill_start_s"])
    waiting_prefill = upto(np.where(columns["rejected"], np.nan, arrival)) - upto(columns["prefill_start_s"])
    moved_on = np.where(to_decode & ~never_prefilled, columns["prefill_end_s"], np.nan)
    waiting_decode = upto(moved_on) - upto(columns["decode_start_s"])
    return np.maximum(0, waiting_prefill + waiting_decode)


def saturation_of(columns: Mapping[str, NDArray[Any]], counted: slice) -> Saturation:
    """Classify a run by the trend of its backlog over the arrivals up to the last counted one.

    Overloaded: the backlog rises through the run (Mann-Kendall over eight batches) by more than 2 % of the arrivals
    meanwhile. Near the knee: it probably rises by more than 1 %, or the mean wait exceeds the mean prefill time.
    """
    n = counted.stop
    if n < 2 * _TREND_BATCHES:
        return Saturation.STABLE
    waiting = backlog({name: values[:n] for name, values in columns.items()})
    first = max(counted.start, n // 5)
    means = np.array([part.mean() for part in np.array_split(waiting[first:], _TREND_BATCHES)])
    i, j = np.triu_indices(_TREND_BATCHES, k=1)
    trend = int(np.sign(means[j] - means[i]).sum())
    growth = (means[-1] - means[0]) / ((n - first) * (_TREND_BATCHES - 1) / _TREND_BATCHES)
    if trend >= _TREND_SURE and growth > _GROWTH_OVERLOADED:
        return Saturation.OVERLOADED
    if trend >= _TREND_LIKELY and growth > _GROWTH_NEAR:
        return Saturation.NEAR_KNEE
    part = slice(first, n)
    wait_s = columns["prefill_start_s"][part] - columns["arrival_s"][part]
    prefill_s = columns["prefill_end_s"][part] - columns["prefill_start_s"][part]
    if np.isnan(wait_s).all():
        return Saturation.OVERLOADED
    return Saturation.NEAR_KNEE if np.nanmean(wait_s) > np.nanmean(prefill_s) else Saturation.STABLE
