"""Goodput: the largest sustainable arrival rate, as an interval, found from noisy probes."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from placement.statistics import Controls, Interval, Level, level, mean_interval

Floats = NDArray[np.float64]

#: Widest bracket, as a log ratio of rates, over which attainment is taken as linear.
_LINEAR: Final = 0.08
#: Distance from the estimated root, as a log ratio, at which the ends of the final bracket are placed.
_BESIDE: Final = 0.03
#: The same of a bracket within which some runs collapse before others: closer to the root fewer do.
_NARROW: Final = 0.03
_CLOSE_BESIDE: Final = 0.01
#: Fall of attainment over a bracket beyond which it is a jump (the stability limit, equal requests), not a slope; and
#: beyond which the slope is so steep that only half the width is taken as linear.
_JUMP: Final = 0.6
_STEEP: Final = 0.3
#: Growth of the logarithm of the misses per log ratio of rates that is assumed before two rates have been probed.
_GROWTH: Final = 12.0
#: Log ratio of two neighbouring rates at least and (at first) at most, while one end of the bracket is missing.
_STEP: Final = (0.06, 0.1)
#: Drift at most that an estimate allows for, as a log ratio.
_MOST_DRIFT: Final = 0.05
#: Stretches say how far apart runs lie, unless neighbours are more alike than the first of these, or some runs collapse
#: before others, so that they lie further apart than the second of these times what their stretches show: then whole
#: runs do, and so many are needed.
_ALIKE: Final = 0.3
_COLLAPSE: Final = 1.7
_RUNS: Final = 3
#: Stretches from which a pair of placements is compared.
_PAIRED: Final = 8
#: Rates probed at most.
_MAX_RATES: Final = 60
#: A placement that fails at this share of its capacity bound sustains nothing.
_NOTHING: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Ask:
    """One probe that an estimator wants: this replication's requests at this rate."""

    rate_per_s: float
    replication: int


@dataclass(frozen=True, slots=True)
class Observation:
    """What one probe saw.

    Args:
        attainment: share of the counted requests that met the limits, 0 to 1; an upper limit if `stopped_early`.
        stable: whether the backlog did not grow.
        stopped_early: the probe ended as soon as it had certainly failed.
        requests: requests simulated.
        late: attainment of the second half of the counted requests, None where it does not matter.
        stretches: attainment of successive equal stretches of the counted requests; empty where not told apart.
    """

    attainment: float
    stable: bool = True
    stopped_early: bool = False
    requests: int = 0
    late: float | None = None
    stretches: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How much is simulated for one estimate.

    Args:
        locate: replications with which the root is sought.
        replications: independent runs behind the interval at first.
        max_replications: and at most, if `precision` asks for more.
        precision: half width of the interval relative to the estimate that is aimed for.
        confidence: of the interval.
        close: look closer to the root where some runs collapse before others.
    """

    locate: int = 2
    replications: int = 6
    max_replications: int = 16
    precision: float = 0.03
    confidence: float = 0.95
    close: bool = False


@dataclass(frozen=True, slots=True)
class Goodput:
    """The largest sustainable rate of one placement.

    Args:
        rate_per_s: of the whole placement.
        log_rates: log of the rate that each replication alone points at, by replication; empty where nothing is
            sustained. Two placements' replications of one number saw the same requests.
        log_stretches: the same of each stretch of each replication, corrected for how its requests differ from what is
            usual; empty where only whole replications say how sure the rate is.
        usual_error: standard error that what is taken as usual adds, as a log ratio.
        bracket_per_s: the highest rate sustained and the lowest not sustained.
        resolution: how far the root may lie from the estimate, as a log ratio, whatever the number of replications:
            what the bracket leaves open, and what attainment still lost from the whole runs to their second halves.
        monotone: False if attainment rose significantly with the rate somewhere.
        resolved: False if the search for the root was given up.
        requests: requests simulated for it.
    """

    rate_per_s: Interval
    log_rates: tuple[float, ...]
    bracket_per_s: tuple[float, float]
    resolution: float = 0.0
    log_stretches: tuple[float, ...] = ()
    usual_error: float = 0.0
    monotone: bool = True
    resolved: bool = True
    requests: int = 0


def ratio(a: Goodput, b: Goodput, *, confidence: float = 0.95) -> Interval | None:
    """Return goodput a / goodput b over the requests that both have seen, paired by common random numbers.

    None where either is 0, or nothing says how sure one is. Where nothing can be paired the intervals are taken as
    independent.
    """
    if not a.rate_per_s.best or not b.rate_per_s.best:
        return None
    runs = min(len(a.log_rates), len(b.log_rates))
    parts = {len(g.log_stretches) // max(len(g.log_rates), 1) for g in (a, b)}
    if len(parts) == 1 and runs * min(parts) >= _PAIRED:
        common = runs * min(parts)
        spread = level(np.subtract(a.log_stretches[:common], b.log_stretches[:common]), runs=runs)
        usual = Level(0.0, math.hypot(spread.error, a.usual_error, b.usual_error), spread.degrees, spread.values, 0.0)
        middle, half = spread.best, usual.half_width(confidence)
    elif runs >= 2:
        paired = [x - y for x, y in zip(a.log_rates[:runs], b.log_rates[:runs], strict=True)]
        whole = mean_interval(paired, confidence=confidence)
        middle, half = whole.best, (whole.high - whole.low) / 2
    else:
        widths = [math.log(g.rate_per_s.high / g.rate_per_s.low) / 2 - g.resolution for g in (a, b)]
        if not all(math.isfinite(width) for width in widths):
            return None
        middle, half = math.log(a.rate_per_s.best / b.rate_per_s.best), math.hypot(*widths)
    best = math.exp(middle)
    half += a.resolution + b.resolution
    return Interval(best * math.exp(-half), best, best * math.exp(half))


@dataclass(slots=True)
class Estimator:
    """Finds the root of a noisy falling function, asking for probes and being told what they saw.

    A few replications locate the rate at which mean attainment crosses the target; all of them are then run at two
    rates close on either side. The interval is Student's over the crossings of the replications, or of stretches of
    them, linearised with the common slope and corrected for how their requests differ from what is usual; it is never
    narrower than what the bracket leaves open and what the runs still drift.

    Args:
        target: attainment that must be reached.
        start_per_s: first rate to probe.
        limit_per_s: no rate above it can be sustained.
        controls: what is known of each replication's requests.
    """

    target: float
    start_per_s: float
    limit_per_s: float = math.inf
    sampling: Sampling = field(default_factory=Sampling)
    controls: Controls | None = None
    seen: dict[float, dict[int, Observation]] = field(default_factory=dict)
    replications: int = 0
    narrow: bool = False
    result: Goodput | None = None

    def __post_init__(self) -> None:
        self.replications = min(self.sampling.locate, self.sampling.replications)
        self.start_per_s = min(self.start_per_s, self.limit_per_s)

    def ask(self) -> list[Ask]:
        """Return the probes wanted next, none when `result` is there."""
        while self.result is None:
            rate = self._next_rate()
            if rate is not None:
                missing = [i for i in range(self.replications) if i not in self.seen.get(rate, {})]
                return [Ask(rate, i) for i in missing]
            goodput = self._estimate()
            if self._is_uneven(goodput) and self.sampling.close and not self.narrow:
                self.narrow = True
            elif self._enough(goodput):
                self.result = goodput
            else:
                self.replications = self._more(goodput)
        return []

    def tell(self, ask: Ask, observation: Observation) -> None:
        """Note what a probe saw."""
        self.seen.setdefault(ask.rate_per_s, {})[ask.replication] = observation

    def extend(self, sampling: Sampling) -> None:
        """Ask for what `sampling` wants beyond the replications there are."""
        self.sampling = sampling
        self.result = None

    def _more(self, goodput: Goodput) -> int:
        """Return the next number of replications: the first stage's, then once what the precision asks for.

        One look at the width only: to stop as soon as it happens to be small would make the interval too narrow.
        """
        wanted, most = self.sampling.replications, self.sampling.max_replications
        if self.replications < wanted:
            return wanted
        if self._is_rough(goodput):
            return self.replications + 1
        return min(max(more_replications(goodput, self.sampling.precision), wanted + 2), most)

    def _is_uneven(self, goodput: Goodput) -> bool:
        """Return whether stretches do not say how far apart runs lie."""
        return self._parts > 1 and bool(goodput.log_rates) and not goodput.log_stretches

    def _is_rough(self, goodput: Goodput) -> bool:
        """Return whether there are too few runs to say so themselves."""
        return self._is_uneven(goodput) and self.replications < _RUNS

    def _enough(self, goodput: Goodput) -> bool:
        if not goodput.log_rates or not goodput.resolved:
            return True
        if self.replications < self.sampling.replications or self._is_rough(goodput):
            return False
        precise = goodput.rate_per_s.half_width <= self.sampling.precision
        return precise or self.replications > self.sampling.replications or self._is_exhausted

    @property
    def _is_exhausted(self) -> bool:
        return self.replications >= self.sampling.max_replications

    @property
    def _parts(self) -> int:
        """Stretches of every run, 1 where they are not told apart."""
        found = {len(run.stretches) for runs in self.seen.values() for run in runs.values()}
        return max(found.pop(), 1) if len(found) == 1 else 1

    def _runs(self, rate_per_s: float) -> list[Observation]:
        return [self.seen[rate_per_s][i] for i in range(self.replications)]

    def _collapses(self, rate_per_s: float) -> bool:
        """Return whether nothing lasts at a rate.

        Nothing does where the backlog grows in at least half of the runs, however good they still look. In fewer it may
        be chance, and the attainment of those runs is low enough.
        """
        runs = self._runs(rate_per_s)
        return 2 * sum(not run.stable for run in runs) >= len(runs)

    def _sustained(self, rate_per_s: float, *, drifts: bool | None = None) -> Floats:
        """Return the attainment that lasts at a rate, by stretch of each replication, shape (runs * stretches,).

        Where the second halves are worse than the whole runs by more than chance explains, the queues were still
        filling: the second halves count, once for each half.
        """
        runs, parts = self._runs(rate_per_s), self._parts
        if self._collapses(rate_per_s):
            return np.zeros(len(runs) * parts)
        if drifts is None:
            drifts = self._drift(rate_per_s) > 0
        if parts > 1:
            values = np.array([run.stretches for run in runs])
            return (_second_half(values) if drifts else values).ravel()
        late = [run.attainment if run.late is None else run.late for run in runs]
        return np.array(late if drifts else [run.attainment for run in runs])

    def _departures(self, *, drifts: bool) -> Floats | None:
        """Return the controls of the same stretches, shape (runs * stretches, k), None where none are known."""
        if self.controls is None or self._parts == 1:
            return None
        rows = np.stack([self.controls.of(i) for i in range(self.replications)])
        if rows.shape[1] != self._parts:
            return None
        return (_second_half(rows) if drifts else rows).reshape(-1, rows.shape[2])

    def _level(self, values: Floats, *, drifts: bool) -> Level:
        covariance = None if self.controls is None else self.controls.covariance
        return level(
            values,
            runs=self.replications,
            controls=self._departures(drifts=drifts),
            covariance=covariance,
            repeated=drifts and self._parts > 1,
        )

    def _mean(self, rate_per_s: float) -> float:
        """Return the attainment that lasts at a rate with the usual traffic."""
        if self._collapses(rate_per_s):
            return 0.0
        drifts = self._drift(rate_per_s) > 0
        return self._level(self._sustained(rate_per_s, drifts=drifts), drifts=drifts).best

    def _corrected(self, rate_per_s: float) -> Floats:
        """Return the attainment that lasts at a rate with the usual traffic, by replication."""
        values = self._sustained(rate_per_s)
        if not self._collapses(rate_per_s):
            drifts = self._drift(rate_per_s) > 0
            values = self._level(values, drifts=drifts).values
        means: Floats = values.reshape(self.replications, -1).mean(axis=1)
        return means

    def _drift(self, rate_per_s: float) -> float:
        """Return the mean attainment that is lost from whole runs to their second halves, 0 if it may be by chance."""
        runs = [run for i, run in self.seen.get(rate_per_s, {}).items() if i < self.replications]
        lost = [run.attainment - run.late for run in runs if run.late is not None]
        if not lost:
            return 0.0
        mean = sum(lost) / len(lost)
        error = statistics.stdev(lost) / math.sqrt(len(lost)) if len(lost) > 1 else 0.0
        if self._parts > 1 and len(lost) == self.replications:
            values = np.array([run.stretches for run in runs])
            changes, departures = _halves(values), self._departures(drifts=False)
            if departures is not None:
                departures = _halves(departures.reshape(*values.shape, -1))
                departures = departures.reshape(-1, departures.shape[-1])
            found = level(changes.ravel(), runs=len(runs), controls=departures)
            mean, error = found.best, found.error
        return mean if mean > error else 0.0

    def _means(self) -> list[tuple[float, float]]:
        """Return (rate, mean attainment) of the rates that all current replications have seen, by rate."""
        return [
            (rate, self._mean(rate))
            for rate in sorted(self.seen)
            if all(i in self.seen[rate] for i in range(self.replications))
        ]

    def _bracket(self, means: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the highest rate that reaches the target and the lowest above it that does not."""
        low, high = (0.0, 1.0), (math.inf, 0.0)
        for rate, mean in means:
            if mean >= self.target:
                low, high = (rate, mean), (math.inf, 0.0)
            elif math.isinf(high[0]):
                high = (rate, mean)
        return low, high

    def _next_rate(self) -> float | None:
        """Return the rate to probe next, None when the crossing is bracketed closely enough (or lost)."""
        means = self._means()
        if not means:
            return self._nearest_seen() or self.start_per_s
        if len(self.seen) >= _MAX_RATES:
            return None
        (low, at_low), (high, at_high) = self._bracket(means)
        if math.isinf(high):
            if low >= self.limit_per_s:
                return None
            if above := [rate for rate in self._incomplete() if rate > low]:
                return min(above)
            return min(
                low * math.exp(self._step(at_low, sum(mean >= self.target for _, mean in means))), self.limit_per_s
            )
        if low == 0:
            if high <= _NOTHING * min(self.limit_per_s, self.start_per_s):
                return None
            if below := [rate for rate in self._incomplete() if rate < high]:
                return max(below)
            return high * math.exp(-self._step(at_high, sum(mean < self.target for _, mean in means)))
        width, fall = math.log(high / low), at_low - at_high
        if fall > _JUMP:
            return math.sqrt(low * high) if width > self.sampling.precision / 2 else None
        if width <= (_NARROW if self.narrow else _LINEAR if fall <= _STEEP else _LINEAR / 2):
            return None
        beside = _CLOSE_BESIDE if self.narrow else _BESIDE
        root = low * math.exp(width * (at_low - self.target) / fall)
        # Close the far side first.
        if root / low > high / root:
            return max(root * math.exp(-beside), low * math.exp(width / 10))
        return min(root * math.exp(beside), high * math.exp(-width / 10))

    def _step(self, attainment: float, tries: int) -> float:
        """Return how far from a rate to look for the other end, as a log ratio.

        As far as misses that grow at the usual speed take; short at first, as starts are good guesses, then longer.
        """
        away = abs(distance(attainment, self.target))
        return min(max(away, _STEP[0]), _STEP[1]) * 1.5 ** max(0, tries - 2)

    def _incomplete(self) -> list[float]:
        """Return the rates that lack replications: to complete one costs less than a new one."""
        return [rate for rate, runs in self.seen.items() if any(i not in runs for i in range(self.replications))]

    def _nearest_seen(self) -> float | None:
        """Return the rate next to the crossing that fewer replications saw."""
        if not self.seen:
            return None
        fewer = {rate: [run.attainment * run.stable for run in runs.values()] for rate, runs in self.seen.items()}
        means = [(rate, sum(values) / len(values)) for rate, values in sorted(fewer.items())]
        low, high = self._bracket(means)
        return low[0] or high[0]

    def _estimate(self) -> Goodput:
        means = self._means()
        (low, at_low), (high, at_high) = self._bracket(means)
        requests = sum(run.requests for runs in self.seen.values() for run in runs.values())
        monotone = self._is_monotone(means)
        if low == 0:
            return Goodput(Interval(0.0, 0.0, high), (), (0.0, high), monotone=monotone, requests=requests)
        resolved = not math.isinf(high) or low >= self.limit_per_s
        if math.isinf(high):
            high, at_high = max(low, self.limit_per_s if math.isfinite(self.limit_per_s) else low) * 1.001, 0.0
        width, fall = math.log(high / low), at_low - at_high
        # Misses grow about exponentially with the rate: their logarithm is closer to a line than attainment is.
        missed = 1 - self.target
        missing = [max(1 - value, missed / 100) for value in (at_low, at_high)]
        growth = math.log(missing[1] / missing[0]) / width
        share = min(max(math.log(missed / missing[0]) / (growth * width), 0.0), 1.0)
        root = math.log(low) + share * width
        drifts = self._drift(low) > 0 or self._drift(high) > 0
        here = self._sustained(low, drifts=drifts)
        there = self._sustained(high, drifts=drifts) if high in self.seen else np.zeros_like(here)
        # The crossing moves with each stretch's misses by the derivative of the interpolation.
        moves = (1 - share) * (at_low - here) / missing[0] + share * (at_high - there) / missing[1]
        raw = root - moves / growth
        found = self._level(raw, drifts=drifts)
        corrected = found.values.reshape(self.replications, -1).mean(axis=1)
        # Where some replications collapse before others the slope of their mean says little: then where each crosses by
        # itself does.
        crossings = np.array(self._crossings(means))
        crossings += root - crossings.mean()
        apart, together = (_deviation(values) for values in (crossings, corrected))
        expected = found.error * math.sqrt(self.replications)
        smooth = self._parts > 1 and found.correlation <= _ALIKE and max(apart, together) <= _COLLAPSE * expected
        runs = corrected if smooth or apart <= together else crossings
        if smooth:
            half = found.half_width(self.sampling.confidence)
        else:
            spread = mean_interval(runs.tolist(), confidence=self.sampling.confidence)
            half = (spread.high - spread.low) / 2
        # A smooth curve departs from the line by the width squared, a jump by anything within it.
        resolution = width * (width + min(fall, 1.0)) / 4
        if self._parts > 1 and not smooth:
            # Runs that have collapsed at the upper end say little of where they begin to.
            resolution += width / 4
        # What was lost in the first half of the runs may be lost once more.
        drift = (1 - share) * self._drift(low) / missing[0] + share * self._drift(high) / missing[1]
        resolution += min(drift / growth, _MOST_DRIFT) if growth > 0 else 0.0
        half += resolution
        below, above = root - half, root + half
        if fall > _JUMP:
            # Where in the bracket attainment jumps is not known.
            below, above = min(below, math.log(low)), max(above, math.log(high))
        return Goodput(
            Interval(math.exp(below), math.exp(root), math.exp(above)),
            tuple(runs.tolist()),
            (low, high),
            resolution,
            tuple(found.values.tolist()) if smooth else (),
            found.shift_error if smooth else 0.0,
            monotone,
            resolved,
            requests,
        )

    def _crossings(self, means: Sequence[tuple[float, float]]) -> list[float]:
        """Return the log of the rate at which each replication's own attainment crosses the target."""
        seen = [(rate, self._corrected(rate)) for rate, _ in means]
        found = []
        for i in range(self.replications):
            (low, at_low), (high, at_high) = self._bracket([(rate, values[i]) for rate, values in seen])
            if low == 0:
                found.append(math.log(high) + max(distance(at_high, self.target), -_STEP[0]))
            elif math.isinf(high):
                found.append(math.log(low) + min(distance(at_low, self.target), _STEP[0]))
            else:
                above, below = distance(at_low, self.target), distance(at_high, self.target)
                share = above / (above - below) if above > below else 0.5
                found.append(math.log(low) + math.log(high / low) * share)
        return found

    def _is_monotone(self, means: Sequence[tuple[float, float]]) -> bool:
        """Return whether attainment never rises from one rate to the next by more than its paired error."""
        for (rate, mean), (faster, above) in itertools.pairwise(means):
            rises = level(self._sustained(faster) - self._sustained(rate), runs=self.replications)
            if above > mean + 0.01 and rises.best > rises.half_width(0.99):
                return False
        return True


def more_replications(goodput: Goodput, precision: float) -> int:
    """Return how many replications of the present length this half width takes, of which the bracket takes a part."""
    noise = goodput.rate_per_s.half_width - goodput.resolution
    allowed = max(precision - goodput.resolution, precision / 2)
    return math.ceil(len(goodput.log_rates) * min(noise / allowed, 1e3) ** 2)


def _deviation(values: Floats) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _second_half(values: Floats) -> Floats:
    """Return the second half of the stretches in place of the first, too; shape (runs, stretches, ...)."""
    half = values.shape[1] // 2
    found: Floats = np.concatenate([values[:, values.shape[1] - half :]] * 2, axis=1)
    return found


def _halves(values: Floats) -> Floats:
    """Return half of what each stretch of the first half exceeds that of the second by, shape (runs, half, ...)."""
    half = values.shape[1] // 2
    return (values[:, :half] - values[:, values.shape[1] - half :]) / 2


def distance(attainment: float, target: float) -> float:
    """Return how far above a rate with this attainment the goodput lies, roughly, as a log ratio; negative below."""
    missed = 1 - target
    return math.log(missed / max(1 - attainment, missed / 100)) / _GROWTH


def estimate(
    probe: Callable[[float, int], Observation],
    *,
    target: float,
    start_per_s: float,
    limit_per_s: float = math.inf,
    sampling: Sampling | None = None,
) -> Goodput:
    """Return the goodput that `probe(rate_per_s, replication)` shows."""
    estimator = Estimator(target, start_per_s, limit_per_s, sampling or Sampling())
    while asks := estimator.ask():
        for ask in asks:
            estimator.tell(ask, probe(ask.rate_per_s, ask.replication))
    assert estimator.result is not None
    return estimator.result
