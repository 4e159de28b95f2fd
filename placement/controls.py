"""Control variates: how the requests of a replication differ from what is usual, and what that is worth."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dsim.pools import Placement
from dsim.trace import Trace
from dsim.workload import Workload, replication_seed
from dsim.workload.arrivals import Constant, Gamma, Poisson
from placement import bounds
from placement.probe import Scenario
from placement.statistics import Controls, stretches
from placement.work import prefill_alone_s

Floats = NDArray[np.float64]

#: Requests from which is taken what is usual, and of them those with which a queue is scaled.
_USUAL: Final = 2**19
_SCALING: Final = 2**15
#: Number of the replication that they are: one that no run uses.
_USUAL_REPLICATION: Final = 2**20
#: Prompt lengths whose prefill time is computed; it is interpolated between them.
_LENGTHS: Final = 200
#: Scales of service times tried, at least and at most.
_SCALES: Final = (0.2, 4.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Requests:
    """Requests at unit rate, columns of shape (n,).

    Args:
        lengths, which: the different numbers of computed tokens, and which of them each request has.
    """

    arrival_s: Floats
    computed_tokens: Floats
    output_tokens: Floats
    lengths: Floats
    which: NDArray[np.intp]

    @classmethod
    def of(cls, trace: Trace) -> _Requests:
        computed = trace.prompt_tokens - trace.cached_prompt_tokens
        lengths, which = np.unique(computed.astype(np.float64), return_inverse=True)
        columns = trace.arrival_s, computed.astype(np.float64), trace.output_tokens.astype(np.float64)
        return cls(*columns, lengths, which)

    def head(self, count: int) -> _Requests:
        columns = self.arrival_s[:count], self.computed_tokens[:count], self.output_tokens[:count]
        return _Requests(*columns, self.lengths, self.which[:count])


@dataclass(slots=True, eq=False)
class Traffic:
    """The requests of a scenario's replications, seen through the queues that placements make of them.

    Args:
        warmup, counted, parts: requests of a run that are dropped and counted, and stretches that these are cut into.
    """

    scenario: Scenario
    warmup: int
    counted: int
    parts: int
    _drawn: dict[int, _Requests] = field(default_factory=dict)

    @property
    def is_random(self) -> bool:
        """Whether requests are drawn independently without end, so that what is usual can be known."""
        workload = self.scenario.workload
        return isinstance(workload, Workload) and isinstance(workload.arrivals, Poisson | Gamma | Constant)

    def controls(self, placement: Placement, rate_per_s: float, case: bounds.Case) -> Controls | None:
        """Return the controls of a placement that is thought to sustain about this rate; None where there are none.

        Three for each stretch of requests: the share that meets the TTFT limit in a single queue that stands for the
        prefill or colocated pool, the work that arrives there per second, and the tokens to be decoded per second.
        Nothing rests on how like the placement that queue is but the width of intervals: all that is used of it is that
        the same is computed of the replication and of what is usual.
        """
        if not self.is_random or self.parts < 2:
            return None
        queue = _Queue.of(self, placement, rate_per_s, case)
        length = self.counted // self.parts
        usual = self._requests(_USUAL_REPLICATION, _USUAL)
        # The first stretch starts from an empty queue.
        seen = queue.features(usual, 0, _USUAL // length)[1:]
        mean = seen.mean(axis=0)
        covariance = np.cov(seen, rowvar=False) / len(seen)

        @functools.cache
        def of(replication: int) -> Floats:
            requests = self._requests(replication, self.warmup + self.counted)
            departures: Floats = queue.features(requests, self.warmup, self.parts) - mean
            return departures

        return Controls(of, np.atleast_2d(covariance))

    def heaviest(self, replications: int) -> int:
        """Return that one of the first replications whose requests bring the most work per second.

        Prompt and output tokens per second are added as shares of their means over the replications.
        """
        if not self.is_random:
            return 0
        loads = np.array([self._load(i) for i in range(replications)])
        return int(np.argmax((loads / loads.mean(axis=0)).sum(axis=1)))

    def _load(self, replication: int) -> Floats:
        """Return prompt and output tokens per second of the requests that count, at unit rate."""
        requests = self._requests(replication, self.warmup + self.counted)
        columns = (requests.computed_tokens, requests.output_tokens)
        span_s = float(requests.arrival_s[-1] - requests.arrival_s[self.warmup])
        return np.array([float(column[self.warmup :].sum()) / span_s for column in columns])

    def _requests(self, replication: int, count: int) -> _Requests:
        if replication not in self._drawn:
            trace = self.scenario.workload.trace(
                num_requests=count,
                seed=replication_seed(self.scenario.seed, replication),
                context_tokens=self.scenario.context_tokens,
                rate_per_s=1.0,
            )
            self._drawn[replication] = _Requests.of(trace)
        return self._drawn[replication]

    def usual_head(self) -> _Requests:
        """Return the requests with which a queue is scaled."""
        return self._requests(_USUAL_REPLICATION, _USUAL).head(_SCALING)


@dataclass(frozen=True, slots=True, eq=False)
class _Queue:
    """A first-come-first-served server that stands for the pool which computes prompts.

    Args:
        lengths, service_s: seconds that a prompt of so many tokens takes alone.
        scale: share of that time for which it keeps the server.
        limit_s: wait and service at most.
    """

    rate_per_s: float
    lengths: Floats
    service_s: Floats
    scale: float
    limit_s: float

    @classmethod
    def of(cls, traffic: Traffic, placement: Placement, rate_per_s: float, case: bounds.Case) -> _Queue:
        """Return the queue in which about as many requests meet the TTFT limit as shall: real ones batch, or decode."""
        pool, usual = placement.pools[0], traffic.usual_head()
        longest = max(float(usual.computed_tokens.max()), float(case.sample.computed_tokens.max()))
        lengths = np.unique(np.geomspace(1, longest, _LENGTHS).round())
        grid = bounds.Sample(lengths, np.ones_like(lengths), np.zeros_like(lengths), np.zeros_like(lengths))
        service_s = prefill_alone_s(pool, bounds.Case(case.profiles, grid, case.slo, case.target, case.options))

        def queue(scale: float, limit_s: float) -> _Queue:
            return cls(rate_per_s, lengths, service_s, scale / pool.count, limit_s)

        low, high = _SCALES
        limit_s = case.slo.ttft_s if math.isfinite(case.slo.ttft_s) else 0.0
        for _ in range(12):
            scale = math.sqrt(low * high)
            met = float((queue(scale, limit_s).sojourns_s(usual) <= limit_s).mean())
            low, high = (scale, high) if met > case.target else (low, scale)
        if limit_s == 0 or not 1.1 * _SCALES[0] < scale < _SCALES[1] / 1.1:
            # Another limit decides: any wait that is exceeded about as often will do.
            scale = 1.0
            limit_s = float(np.quantile(queue(scale, math.inf).sojourns_s(usual), case.target))
        return queue(scale, limit_s)

    def services_s(self, requests: _Requests) -> Floats:
        """Return the service time of each request."""
        found: Floats = np.interp(requests.lengths, self.lengths, self.service_s)[requests.which]
        return found

    def sojourns_s(self, requests: _Requests) -> Floats:
        """Return wait and service of each request, by Lindley's recursion."""
        service_s = self.services_s(requests)
        gaps_s = np.diff(requests.arrival_s) / self.rate_per_s
        work_s = np.concatenate([[0.0], np.cumsum(self.scale * service_s[:-1] - gaps_s)])
        found: Floats = work_s - np.minimum.accumulate(work_s) + service_s
        return found

    def features(self, requests: _Requests, first: int, parts: int) -> Floats:
        """Return the controls of the stretches after the `first` requests, shape (parts, 3)."""
        met = (self.sojourns_s(requests) <= self.limit_s)[first:].astype(np.float64)
        gaps = np.diff(requests.arrival_s, prepend=0.0)[first:]
        service_s = self.services_s(requests)[first:]
        gap = stretches(gaps, parts)
        work = stretches(service_s, parts) / gap
        decoded = stretches(requests.output_tokens[first:], parts) / gap
        return np.stack([stretches(met, parts), work, decoded], axis=1)
