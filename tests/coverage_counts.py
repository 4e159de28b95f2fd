"""How often intervals hold the truth, and how wide they are: `python -m tests.coverage_counts [SEEDS]` prints it."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from placement.goodput import Estimator, Goodput, Observation, Sampling, more_replications
from placement.queueing import md1_goodput_per_s
from placement.statistics import Controls, stretches

SERVICE_S: Final = 0.1
LIMIT_S: Final = 2 * SERVICE_S
TARGET: Final = 0.9
TRUTH_PER_S: Final = md1_goodput_per_s(SERVICE_S, ttft_s=LIMIT_S, attainment=TARGET)

PARTS: Final = 16
_WARMUP: Final = 500
#: Limit of the queues that collapse: how much slower they become, and beyond which waiting work.
_PATIENCE_S: Final = 12 * SERVICE_S
COLLAPSING: Final = ((1.05, 0.6), (1.12, 0.8), (1.2, 1.0))
#: Targets that leave few misses in a run, limits, from far below saturation to near it, and requests that runs count.
FEW_MISSES: Final = (
    (0.98, 0.2, 10_000),
    (0.99, 0.2, 10_000),
    (0.99, 0.6, 10_000),
    (0.99, 1.2, 10_000),
    (0.999, 0.6, 50_000),
)
#: Requests from which the usual controls are taken, as a multiple of one run's.
_USUAL: Final = 30


@dataclass(frozen=True, slots=True)
class Fifo:
    """An M/D/1 queue by Lindley's recursion, and a likeness of it whose service takes a share of the time as a control.

    Args:
        counted: requests counted in one run.
        likeness: service time of the control's queue, relative; at 1 the control is nearly the thing itself.
    """

    seed: int
    counted: int = 4000
    likeness: float = 0.9
    anchor_per_s: float = 0.95 * TRUTH_PER_S

    def probe(self, rate_per_s: float, replication: int) -> Observation:
        """Return what a run of this replication sees."""
        met = self._met(self._gaps(replication), rate_per_s, SERVICE_S)
        late = float(met[len(met) // 2 :].mean())
        parts = tuple(stretches(met, PARTS).tolist())
        stable = rate_per_s * SERVICE_S < 1
        return Observation(float(met.mean()), stable=stable, requests=len(met), late=late, stretches=parts)

    @property
    def controls(self) -> Controls:
        """The share that meets the limit in the likeness, and the arrivals per second."""
        usual = self._features(np.random.default_rng([self.seed, 1 << 20]), _USUAL)

        def of(replication: int) -> NDArray[np.float64]:
            own = self._features(np.random.default_rng([self.seed, replication]), 1)
            departures: NDArray[np.float64] = own - usual.mean(axis=0)
            return departures

        return Controls(of, np.cov(usual, rowvar=False) / len(usual))

    def _gaps(self, replication: int) -> NDArray[np.float64]:
        return np.random.default_rng([self.seed, replication]).standard_exponential(_WARMUP + self.counted)

    def _features(self, rng: np.random.Generator, runs: int) -> NDArray[np.float64]:
        gaps = rng.standard_exponential(_WARMUP + runs * self.counted)
        met = self._met(gaps, self.anchor_per_s, self.likeness * SERVICE_S)
        parts = runs * PARTS
        return np.stack([stretches(met, parts), 1 / stretches(gaps[_WARMUP:], parts)], axis=1)

    def _met(self, gaps: NDArray[np.float64], rate_per_s: float, service_s: float) -> NDArray[np.float64]:
        work_s = np.concatenate([[0.0], np.cumsum(service_s - gaps[1:] / rate_per_s)])
        sojourn_s = work_s - np.minimum.accumulate(work_s) + service_s
        return (sojourn_s[_WARMUP:] <= LIMIT_S + 1e-12).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Collapsing:
    """A queue whose service takes longer while much waits: near saturation some runs collapse where others do not.

    Args:
        slower: service time while more than `waiting_s` of work waits, relative.
        limit_s: of the sojourn.
    """

    seed: int
    slower: float
    waiting_s: float
    limit_s: float = _PATIENCE_S
    counted: int = 10_000

    def probe(self, rate_per_s: float, replication: int) -> Observation:
        """Return what a run of this replication sees."""
        rng = np.random.default_rng([self.seed, replication])
        gaps_s = rng.standard_exponential(2 * _WARMUP + self.counted) / rate_per_s
        waits_s, work_s = [], 0.0
        for gap_s in gaps_s.tolist():
            work_s = max(work_s - gap_s, 0.0)
            work_s += SERVICE_S * (self.slower if work_s > self.waiting_s else 1.0)
            waits_s.append(work_s)
        left = np.array(waits_s[2 * _WARMUP :])
        met = (left <= self.limit_s + 1e-12).astype(np.float64)
        early, late = (float(half.mean()) for half in np.array_split(left, 2))
        stable = not (late > 2 * early and late > 20 * SERVICE_S)
        parts = tuple(stretches(met, PARTS).tolist())
        half = float(met[len(met) // 2 :].mean())
        return Observation(float(met.mean()), stable=stable, requests=len(left), late=half, stretches=parts)

    def heaviest(self, replications: int) -> int:
        """Return that one of the first replications in which requests come fastest."""
        spans = [
            np.random.default_rng([self.seed, i]).standard_exponential(self.counted).sum() for i in range(replications)
        ]
        return int(np.argmin(spans))

    def truth_per_s(self, runs: int = 400) -> float:
        """Return the rate at which the mean attainment of many other runs is the target."""
        low, high = 0.7 / SERVICE_S, 1 / SERVICE_S
        for _ in range(10):
            rate = (low + high) / 2
            met = [self.probe(rate, 10**6 + i).attainment for i in range(runs)]
            low, high = (rate, high) if np.mean(met) >= TARGET else (low, rate)
        return (low + high) / 2


def finish(estimator: Estimator, probe: Callable[[float, int], Observation]) -> Goodput:
    """Return what an estimator finds once all that it asks for is probed."""
    while asks := estimator.ask():
        for ask in asks:
            estimator.tell(ask, probe(ask.rate_per_s, ask.replication))
    assert estimator.result is not None
    return estimator.result


@dataclass(frozen=True, slots=True)
class Count:
    """How often the truth lay within, how wide intervals were, and what they took.

    Args:
        half_width: mean, relative.
        error: root of the mean squared error, relative.
        requests: mean, of one estimate.
    """

    name: str
    tries: int
    within: int
    half_width: float
    error: float
    requests: float


def count(name: str, sampling: Sampling, *, seeds: range, controlled: bool = True) -> Count:
    """Return how the intervals of as many estimates do."""
    found = []
    for seed in seeds:
        queue = Fifo(seed)
        controls = queue.controls if controlled else None
        start_per_s = TRUTH_PER_S * np.random.default_rng([seed, 1 << 21]).uniform(0.85, 1.1)
        found.append(finish(Estimator(TARGET, float(start_per_s), 1 / SERVICE_S, sampling, controls), queue.probe))
    return _tally(name, found, TRUTH_PER_S)


def collapse_count(slower: float, waiting_s: float, *, seeds: range) -> tuple[Count, Count]:
    """Return how intervals of reported rows and of best ones do where runs may collapse."""
    queue = Collapsing(1 << 20, slower, waiting_s)
    return _row_counts(queue, TARGET, queue.truth_per_s(), seeds)


def few_misses_count(target: float, limit_s: float, counted: int, *, seeds: range) -> tuple[Count, Count]:
    """Return how intervals of reported rows and of best ones do for M/D/1 where few requests may miss the limit."""
    queue = Collapsing(0, 1.0, math.inf, limit_s, counted)
    return _row_counts(queue, target, md1_goodput_per_s(SERVICE_S, ttft_s=limit_s, attainment=target), seeds)


def _row_counts(kind: Collapsing, target: float, truth_per_s: float, seeds: range) -> tuple[Count, Count]:
    """Return how intervals of a row and of a best one do, made as a search makes them."""
    found: dict[str, list[Goodput]] = {"a row": [], "the best, 2 %": []}
    for seed in seeds:
        queue = replace(kind, seed=seed)
        start_per_s = truth_per_s * float(np.random.default_rng([seed, 1 << 21]).uniform(0.93, 1.04))
        probe = functools.cache(queue.probe)
        for name, goodputs in found.items():
            row = Sampling(locate=1, replications=3, max_replications=3, precision=0.05)
            estimator = Estimator(target, start_per_s, 1 / SERVICE_S, row, risky=True, scout=queue.heaviest(3))
            goodput = finish(estimator, probe)
            if name != "a row":
                for most in (3, 16):
                    wanted = 3 if most == 3 else min(more_replications(goodput, 0.02, runs=estimator.runs), most)
                    estimator.extend(Sampling(locate=1, replications=wanted, max_replications=wanted, close=True))
                    goodput = finish(estimator, probe)
            elif goodput.rate_per_s.half_width > row.precision:
                estimator.extend(replace(row, max_replications=5))
                goodput = finish(estimator, probe)
            goodputs.append(goodput)
    first, second = (_tally(name, goodputs, truth_per_s) for name, goodputs in found.items())
    return first, second


def _tally(name: str, found: Sequence[Goodput], truth_per_s: float) -> Count:
    rates = [goodput.rate_per_s for goodput in found]
    return Count(
        name,
        len(rates),
        sum(rate.low <= truth_per_s <= rate.high for rate in rates),
        float(np.mean([rate.half_width for rate in rates])),
        float(np.sqrt(np.mean([(rate.best / truth_per_s - 1) ** 2 for rate in rates]))),
        float(np.mean([goodput.requests for goodput in found])),
    )


SAMPLINGS: Final = {
    "one run": Sampling(locate=1, replications=1, max_replications=1),
    "two runs, sought with one": Sampling(locate=1, replications=2, max_replications=2),
    "two runs": Sampling(locate=2, replications=2, max_replications=2),
    "2 %, at least two runs": Sampling(locate=2, replications=2, max_replications=16, precision=0.02),
    "two runs, 80 %": Sampling(locate=2, replications=2, max_replications=2, confidence=0.8),
}


def main(seeds: int) -> None:
    """Print one row for each way of sampling, with controls and without, and where runs may collapse."""
    for controlled in (True, False):
        sys.stdout.write(f"{'with' if controlled else 'without'} controls\n")
        for name, sampling in SAMPLINGS.items():
            _write(count(name, sampling, seeds=range(seeds), controlled=controlled))
    for slower, waiting_s in COLLAPSING:
        sys.stdout.write(f"a queue that becomes {slower - 1:.0%} slower beyond {waiting_s:g} s of work\n")
        for row in collapse_count(slower, waiting_s, seeds=range(seeds)):
            _write(row)
    for target, limit_s, counted in FEW_MISSES:
        sys.stdout.write(f"M/D/1, {target:.1%} within {limit_s:g} s\n")
        for row in few_misses_count(target, limit_s, counted, seeds=range(seeds)):
            _write(row)


def _write(row: Count) -> None:
    share = row.within / row.tries
    sys.stdout.write(f"  {row.name:25} {share:6.1%} {row.half_width:6.2%} {row.error:6.2%} {row.requests:9.0f}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
