"""The least time that requests take of a queue served in order of arrival, on the arrivals of a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Share of the sample that arrives first and does not count, as its queue starts empty.
_WARMUP: Final = 0.1
#: Runs of successive requests from whose means the error of a share is taken.
_BATCHES: Final = 16
#: Requests below which a sample says nothing about waiting.
_FEWEST: Final = 1000
#: Halvings of the interval in which the rate is sought.
_HALVINGS: Final = 9


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """What a batch takes of its server at least: `batch_s`, and for each of its requests the rest.

    Args:
        request_s: seconds of each sampled request, shape (n,).
        shared_s: the same with its share of `batch_s` in the largest batch.
    """

    batch_s: float
    request_s: Floats
    shared_s: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Queue:
    """Instances that serve requests in order of arrival, in batches, without overtaking or dropping any.

    Args:
        arrival_s: of the sampled requests at 1 request per second, shape (n,), rising.
        services: lower limits of what batches take; each holds for all of them.
        alone_s: seconds that each request takes of the instance when nobody else is there.
        after_s: seconds that a request still takes after the server, as in later pipeline stages.
        instances: that take turns: request i goes to number i modulo this.
    """

    arrival_s: Floats
    services: Sequence[Service]
    alone_s: Floats
    after_s: Floats
    instances: int = 1

    def least_s(self, rate_per_s: float) -> Floats:
        """Return a lower limit of the time from each request's arrival to the end of its service, shape (n,).

        A server that has finished request i has done the work of all requests before it, none of request j and later
        ones before j arrived. So with w the work of a request, whatever the batches are, the end of i is no sooner than
        the arrival of j and the work of j to i for any j <= i: Lindley's recursion. Work is a request's own, and one
        batch's constant for the batch that i is in; or its own and its share of the constant of a largest batch.
        """
        arrival_s = self.arrival_s / rate_per_s
        least_s = self.alone_s
        # The services that keep a server busy the longest.
        own = max(self.services, key=lambda service: float(service.request_s.mean()))
        shared = max(self.services, key=lambda service: float(service.shared_s.mean()))
        for added_s, work_s in ((own.batch_s, own.request_s), (0.0, shared.shared_s)):
            least_s = np.maximum(least_s, self._lindley(arrival_s, work_s) + added_s + self.after_s)
        return least_s

    def _lindley(self, arrival_s: Floats, work_s: Floats) -> Floats:
        """Return the times that a server takes which works whenever there is something to do."""
        done_s = self._by_instance(work_s).cumsum(axis=0)
        arrivals, works = self._by_instance(arrival_s), self._by_instance(work_s)
        late_s = np.maximum.accumulate(arrivals - (done_s - works), axis=0)
        taken_s = (done_s + late_s - arrivals).ravel()
        return np.append(taken_s, work_s[len(taken_s) :])

    def _by_instance(self, values: Floats) -> Floats:
        rows = len(values) // self.instances
        return values[: rows * self.instances].reshape(rows, self.instances)

    def highest_rate_per_s(self, limits_s: Floats, *, target: float, most_per_s: float, margin: float) -> float:
        """Return a rate from which on fewer than `target` of the requests are served within their limits.

        The share falls with the rate, as the times between arrivals shrink and nothing else changes.

        Args:
            limits_s: seconds from each request's arrival to the end of its service, shape (n,).
            most_per_s: returned if more than that were not too much either.
            margin: standard errors that the share on the sample must lie below the target.
        """
        low, high = 0.0, most_per_s
        if len(limits_s) < _FEWEST or not self._fails(high, limits_s, target, margin):
            return high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._fails(middle, limits_s, target, margin) else (middle, high)
        return high

    def _fails(self, rate_per_s: float, limits_s: Floats, target: float, margin: float) -> bool:
        met = (self.least_s(rate_per_s) <= limits_s)[int(_WARMUP * len(limits_s)) :]
        means = [float(batch.mean()) for batch in np.array_split(met, _BATCHES)]
        error = float(np.std(means, ddof=1)) / math.sqrt(_BATCHES)
        # Batches that agree by chance say nothing of the error of independent requests.
        share = float(met.mean())
        error = max(error, math.sqrt(share * (1 - share) / len(met)))
        return share + margin * error < target
