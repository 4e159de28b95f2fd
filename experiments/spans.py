"""Spans of requests and their distributions: one definition for sweeps, which have a run, and figures of its file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from placement.statistics import student_t

Floats = NDArray[np.float64]

#: Instants between which a span runs (docs/semantics.md, section 7).
_BETWEEN: Final = {
    "queue_s": ("arrival_s", "prefill_start_s"),
    "prefill_s": ("prefill_start_s", "prefill_end_s"),
    "transfer_s": ("transfer_start_s", "transfer_end_s"),
    "decode_s": ("decode_start_s", "last_token_s"),
}
SPANS: Final = tuple(_BETWEEN)

#: Shares of a distribution that a list of quantiles holds the values of.
_LEVELS: Final = np.linspace(0.0, 1.0, 101)
#: Parts that one run is cut into for an interval, and requests that each has at least.
PARTS, _LEAST = 20, 10


def span_s(name: str, column: Callable[[str], Floats]) -> Floats:
    """Return a span of each request, seconds; NaN where it did not happen.

    Args:
        name: one of `SPANS`.
        column: returns the instants of that name, one for each request.
    """
    start, end = _BETWEEN[name]
    seconds: Floats = column(end) - column(start)
    return seconds


def quantiles_of(values: Floats) -> list[float] | None:
    """Return the values at 0, 1, ... 100 % of those that are known; None where none is."""
    known = values[~np.isnan(values)]
    return [float(value) for value in np.quantile(known, _LEVELS)] if len(known) else None


def quantile_limits(values: Floats, *, confidence: float) -> dict[str, list[float]] | None:
    """Return the limits of these quantiles from one run, as `low` and `high`; None where it is too short for any.

    Requests that follow each other wait in the same queue, so an interval that takes them for independent is too
    narrow. The run is cut into 20 parts one after the other; how much the share of requests below a quantile differs
    between them gives the t interval of that share, and the quantiles at its ends are the limits. It holds where a
    part is longer than the memory of the queue, and says nothing of the extremes.

    Args:
        values: of the requests in the order of their arrival.
    """
    known = values[~np.isnan(values)]
    if len(known) < PARTS * _LEAST:
        return None
    at = np.quantile(known, _LEVELS)
    shares = np.array([np.mean(part[:, None] <= at[None, :], axis=0) for part in np.array_split(known, PARTS)])
    half = student_t(confidence, PARTS - 1) * shares.std(axis=0, ddof=1) / np.sqrt(PARTS)
    ends = {"low": _LEVELS - half, "high": _LEVELS + half}
    return {end: np.quantile(known, np.clip(levels, 0.0, 1.0)).tolist() for end, levels in ends.items()}
