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

from placement.statistics import Controls, Interval, Level, level, mean_interval, student_t

Floats = NDArray[np.float64]

#: Widest bracket, as a log ratio of rates, over which attainment is taken as linear.
_LINEAR: Final = 0.08
#: The same where attainment falls little and no more than this precision is asked for.
_ROUGH_LINEAR, _ROUGH = 0.12, 0.1
#: Distance from the estimated root, as a log ratio, at which the ends of the final bracket are placed.
_BESIDE: Final = 0.03
#: Widest bracket within which some runs collapse before others, for a close look: closer to the root fewer do.
_NARROW: Final = 0.032
#: Misses that come with a rate a fraction higher, as a multiple of those allowed and of that fraction, beyond which
#: attainment falls over a cliff.
_CLIFF: Final = 40.0
#: Fall of attainment over a bracket beyond which it is a jump (the stability limit, equal requests), not a slope; and
#: beyond which the slope is so steep that only half the width is taken as linear.
_JUMP: Final = 0.6
_STEEP: Final = 0.3
#: Growth of the logarithm of the misses per log ratio of rates that is assumed before two rates have been probed.
_GROWTH: Final = 12.0
#: Log ratio of two neighbouring rates at least and (at first) at most, while one end of the bracket is missing; and
#: near saturation, where runs that have collapsed say nothing.
_STEP: Final = (0.06, 0.1)
_RISKY_STEP: Final = (0.03, 0.04)
#: How far beyond the crossing that two rates point at the next one is put, as a log ratio.
_BEYOND: Final = 0.02
#: Times at most that such a step grows by half.
_MOST_GROWTHS: Final = 12
#: Drift at most that an estimate allows for, as a log ratio.
_MOST_DRIFT: Final = 0.05
#: Stretches say how far apart runs lie, unless neighbours are more alike than the first of these, or some runs collapse
#: before others, so that they lie further apart than the second of these times what their stretches show: then whole
#: runs do, and so many are needed.
_ALIKE: Final = 0.55
_COLLAPSE: Final = 1.7
_RUNS: Final = 3
#: What the width is multiplied by that stretches say of a placement whose runs may collapse: the first few runs tell
#: too little of it (coverage counted on queues that collapse).
_RISKY_WIDTH: Final = 1.25
#: Stretches from which a pair of placements is compared.
_PAIRED: Final = 8
#: Largest logarithm of a rate that is told.
_LARGEST_LOG: Final = 700.0
#: Rates probed at most.
_MAX_RATES: Final = 60
#: A placement that fails at this share of its capacity bound sustains nothing.
_NOTHING: Final = 1e-3
#: The search is given up at a rate of so many times the first one.
_ENDLESS: Final = 1e9


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

    None where either is 0, or nothing says how sure one is. Where only whole runs can be paired, or nothing, the
    intervals are taken as independent if that leaves less open: common requests make a ratio surer than that.
    """
    if not a.rate_per_s.best or not b.rate_per_s.best:
        return None
    runs = min(len(a.log_rates), len(b.log_rates))
    parts = {len(g.log_stretches) // max(len(g.log_rates), 1) for g in (a, b)}
    if len(parts) == 1 and runs * min(parts) >= _PAIRED:
        common = runs * min(parts)
        apart = np.subtract(a.log_stretches[:common], b.log_stretches[:common])
        spread = level(apart, runs=runs, repeated=any(_is_repeated(g) for g in (a, b)))
        usual = Level(0.0, math.hypot(spread.error, a.usual_error, b.usual_error), spread.degrees, spread.values, 0.0)
        middle, half = spread.best, usual.half_width(confidence)
        return _around(middle, half + a.resolution + b.resolution)
    # Few whole runs say little of the spread of their differences: what both intervals leave open may be less.
    found = []
    if runs >= 2:
        paired = [x - y for x, y in zip(a.log_rates[:runs], b.log_rates[:runs], strict=True)]
        whole = mean_interval(paired, confidence=confidence)
        found.append(((whole.high - whole.low) / 2, whole.best))
    ranges = [g.rate_per_s for g in (a, b)]
    if all(r.low and math.isfinite(r.high) for r in ranges):
        widths = [math.log(r.high / r.low) / 2 - g.resolution for r, g in zip(ranges, (a, b), strict=True)]
        found.append((math.hypot(*widths), math.log(a.rate_per_s.best / b.rate_per_s.best)))
    if not found:
        return None
    half, middle = min(found)
    return _around(middle, half + a.resolution + b.resolution)


@dataclass(slots=True)
class Estimator:
    """Finds the root of a noisy falling function, asking for probes and being told what they saw.

    A few replications locate the rate at which mean attainment crosses the target, between two rates close on either
    side. Where stretches of them say how far apart runs lie, further replications are run at the crossing only: the
    slope is known. Elsewhere all are run on both sides. The interval is Student's over the crossings of the
    replications, or of stretches of them, linearised with the common slope and corrected for how their requests differ
    from what is usual; it is never narrower than what the bracket leaves open and what the runs still drift.

    Args:
        target: attainment that must be reached.
        start_per_s: first rate to probe.
        limit_per_s: no rate above it can be sustained.
        controls: what is known of each replication's requests.
        risky: the placement is so close to saturation that some runs may collapse where others do not.
        scout: the replication that then looks for the rates at which all are run: of those run first the one with the
            most work, as it collapses first.
        replications: those run on both sides of the crossing.
        more: those run at `anchor_per_s` only: the crossing that the others show or, where runs lie far apart, the side
            of it that tells less.
    """

    target: float
    start_per_s: float
    limit_per_s: float = math.inf
    sampling: Sampling = field(default_factory=Sampling)
    controls: Controls | None = None
    risky: bool = False
    scout: int = 0
    seen: dict[float, dict[int, Observation]] = field(default_factory=dict)
    replications: int = 0
    more: int = 0
    anchor_per_s: float = 0.0
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
                missing = [i for i in self._numbers if i not in self.seen.get(rate, {})]
                return [Ask(rate, i) for i in missing]
            there = self.seen.get(self.anchor_per_s, {})
            if missing := [i for i in range(self.replications, self.runs) if i not in there]:
                return [Ask(self.anchor_per_s, i) for i in missing]
            if self._is_scouting:
                self.replications = _RUNS
                continue
            goodput = self._estimate()
            if self._is_uneven(goodput) and self.sampling.close and not self.narrow:
                self.narrow, self.more = True, 0
            elif self._enough(goodput):
                self.result = goodput
            else:
                self._add(goodput)
        return []

    def tell(self, ask: Ask, observation: Observation) -> None:
        """Note what a probe saw."""
        self.seen.setdefault(ask.rate_per_s, {})[ask.replication] = observation

    def extend(self, sampling: Sampling) -> None:
        """Ask for what `sampling` wants beyond the replications there are."""
        self.sampling = sampling
        self.result = None

    @property
    def runs(self) -> int:
        """Replications run, or asked for, on both sides of the crossing and at it."""
        return self.replications + self.more

    @property
    def _is_scouting(self) -> bool:
        """Whether one replication looks for the rates at which all will be run."""
        return self.risky and self.replications == 1

    @property
    def _numbers(self) -> Sequence[int]:
        """The replications that are run on both sides of the crossing at present."""
        return (self.scout,) if self._is_scouting else range(self.replications)

    def _add(self, goodput: Goodput) -> None:
        """Add replications: up to the first stage's, then once as many as the precision asks for.

        One look at the width only: to stop as soon as it happens to be small would make the interval too narrow.
        """
        wanted = self.sampling.replications
        count = wanted if self.runs < wanted else self._afterwards(goodput)
        if self._is_uneven(goodput):
            # Some runs collapse: a few are run on both sides, the others where they differ most.
            if self.replications < _RUNS:
                self.replications, self.more = _RUNS, 0
                return
            if self._is_bracketed:
                self.anchor_per_s = self.anchor_per_s if self.more else self._noisier_end()
                self.more = count - self.replications
                return
        crosses_between = self.more > 0 or goodput.rate_per_s.best not in self.seen
        if goodput.log_stretches and self._is_bracketed and not self._jumps and crosses_between:
            self.anchor_per_s = self.anchor_per_s if self.more else goodput.rate_per_s.best
            self.more = count - self.replications
        else:
            self.replications, self.more = count, 0

    def _afterwards(self, goodput: Goodput) -> int:
        wanted, most = self.sampling.replications, self.sampling.max_replications
        return min(max(more_replications(goodput, self.sampling.precision, runs=self.runs), wanted + 2), most)

    def _is_uneven(self, goodput: Goodput) -> bool:
        """Return whether stretches do not say how far apart runs lie."""
        return self._parts > 1 and bool(goodput.log_rates) and not goodput.log_stretches

    def _is_rough(self, goodput: Goodput) -> bool:
        """Return whether there are too few runs to say so themselves."""
        return self._is_uneven(goodput) and self.replications < _RUNS

    def _enough(self, goodput: Goodput) -> bool:
        if not goodput.log_rates or not goodput.resolved:
            return True
        if self.runs < self.sampling.replications or self._is_rough(goodput):
            return False
        precise = goodput.rate_per_s.half_width <= self.sampling.precision
        return precise or self.runs > self.sampling.replications or self.runs >= self.sampling.max_replications

    @property
    def _parts(self) -> int:
        """Stretches of every run, 1 where they are not told apart."""
        found = {len(run.stretches) for runs in self.seen.values() for run in runs.values()}
        return max(found.pop(), 1) if len(found) == 1 else 1

    def _runs(self, rate_per_s: float) -> list[Observation]:
        """Return the replications run on both sides of the crossing, and those added on this side."""
        seen = self.seen[rate_per_s]
        added = self.more > 0 and rate_per_s == self.anchor_per_s and all(i in seen for i in range(self.runs))
        return [seen[i] for i in (range(self.runs) if added else self._numbers)]

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

    def _departures(self, count: int, *, drifts: bool) -> Floats | None:
        """Return the controls of the stretches of so many replications, shape (count * stretches, k), if known."""
        if self.controls is None or self._parts == 1:
            return None
        rows = np.stack([self.controls.of(i) for i in (self._numbers if self._is_scouting else range(count))])
        if rows.shape[1] != self._parts:
            return None
        return (_second_half(rows) if drifts else rows).reshape(-1, rows.shape[2])

    def _level(self, values: Floats, *, drifts: bool) -> Level:
        """Return the mean of stretches, one replication's after the other's."""
        covariance = None if self.controls is None else self.controls.covariance
        count = len(values) // self._parts
        return level(
            values,
            runs=count,
            controls=self._departures(count, drifts=drifts),
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
        means: Floats = values.reshape(-1, self._parts).mean(axis=1)
        return means

    def _drift(self, rate_per_s: float) -> float:
        """Return the mean attainment that is lost from whole runs to their second halves, 0 if it may be by chance."""
        seen = self.seen.get(rate_per_s, {})
        runs = self._runs(rate_per_s) if all(i in seen for i in self._numbers) else []
        lost = [run.attainment - run.late for run in runs if run.late is not None]
        if not lost:
            return 0.0
        mean = sum(lost) / len(lost)
        error = statistics.stdev(lost) / math.sqrt(len(lost)) if len(lost) > 1 else 0.0
        if self._parts > 1:
            values = np.array([run.stretches for run in runs])
            changes, departures = _halves(values), self._departures(len(runs), drifts=False)
            if departures is not None:
                departures = _halves(departures.reshape(*values.shape, -1))
                departures = departures.reshape(-1, departures.shape[-1])
            found = level(changes.ravel(), runs=len(runs), controls=departures)
            mean, error = found.best, found.error
        return mean if mean > error else 0.0

    def _means(self) -> list[tuple[float, float]]:
        """Return (rate, mean attainment) of the rates that all current replications have seen, by rate."""
        return [
            (rate, self._mean(rate)) for rate in sorted(self.seen) if all(i in self.seen[rate] for i in self._numbers)
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
            most = min(self.limit_per_s, _ENDLESS * self.start_per_s)
            if low >= most:
                return None
            if above := [rate for rate in self._incomplete() if rate > low]:
                return min(above)
            return min(low * math.exp(self._step([m for m in means if m[1] >= self.target][-2:], len(means))), most)
        if low == 0:
            least = _NOTHING * min(self.limit_per_s, self.start_per_s)
            if high <= least:
                return None
            if below := [rate for rate in self._incomplete() if rate < high]:
                return max(below)
            return max(high * math.exp(-self._step(means[1::-1], len(means))), least)
        width, fall = math.log(high / low), at_low - at_high
        if self._is_scouting:
            return math.sqrt(low * high) if width > _LINEAR / 2 else None
        if fall > _JUMP:
            return math.sqrt(low * high) if width > self.sampling.precision / 2 else None
        if width <= (_NARROW if self.narrow else _LINEAR if fall <= _STEEP else _LINEAR / 2):
            return None
        if self.sampling.precision >= _ROUGH and width <= _ROUGH_LINEAR and fall <= _STEEP / 2:
            return None
        if self.narrow:
            # Runs collapse at different rates: the mean says little of where between them.
            return math.sqrt(low * high)
        root = low * math.exp(width * (at_low - self.target) / fall)
        # Close the far side first.
        if root / low > high / root:
            return max(root * math.exp(-_BESIDE), low * math.exp(width / 10))
        return min(root * math.exp(_BESIDE), high * math.exp(-width / 10))

    def _step(self, nearest: Sequence[tuple[float, float]], tries: int) -> float:
        """Return how far from a rate to look for the other end, as a log ratio.

        As far as misses that grow as between two rates take, or at the usual speed; short at first, as starts are good
        guesses, then longer.

        Args:
            nearest: rates and their attainment, at most two, that nearest to the crossing last.
        """
        rate, attainment = nearest[-1]
        away = abs(distance(attainment, self.target))
        least, most = _RISKY_STEP if self.risky else _STEP
        if len(nearest) == 2 and not self.risky:
            before, better = nearest[0]
            growth = _GROWTH * (distance(better, self.target) - distance(attainment, self.target))
            growth /= math.log(rate / before)
            if growth > 1:
                away = away * _GROWTH / growth + _BEYOND
                most = _STEP[1] + _BEYOND
        return min(max(away, least), most) * 1.5 ** min(max(0, tries - 2), _MOST_GROWTHS)

    def _incomplete(self) -> list[float]:
        """Return the rates that lack replications: to complete one costs less than a new one."""
        return [rate for rate, runs in self.seen.items() if any(i not in runs for i in self._numbers)]

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
        if self.more and self.anchor_per_s in {low, high} and high in self.seen:
            return self._from_ends(low, high, monotone=monotone, requests=requests)
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
        count = len(here) // self._parts
        alike = count >= _RUNS or not (self.risky or fall > _STEEP)
        if self.more and 0 not in self.seen[self.anchor_per_s]:
            # At the crossing the curve's misses are what they may be, and it falls as it does between the two rates.
            away = math.log(self.anchor_per_s) - root
            there = self._at_anchor(drifts=drifts)
            wanting = missed * math.exp(growth * away)
            raw = np.concatenate([raw, root + (there - (1 - wanting)) / (wanting * growth)])
            everything = self._level(raw, drifts=drifts)
            alike = alike and self._is_smooth(everything)
            if alike:
                found, count, root = everything, self.runs, everything.best
        # Where some replications collapse before others the slope of their mean says little: then where each crosses by
        # itself does.
        corrected = found.values.reshape(count, -1).mean(axis=1)
        crossings = np.array(self._crossings(means))
        crossings += root - crossings.mean()
        smooth = alike and self._is_smooth(found, crossings)
        runs = corrected if smooth or _deviation(crossings) <= _deviation(corrected) else crossings
        if smooth:
            half = found.half_width(self.sampling.confidence) * (_RISKY_WIDTH if self.risky else 1.0)
        else:
            spread = mean_interval(runs.tolist(), confidence=self.sampling.confidence)
            half = (spread.high - spread.low) / 2
        # A smooth curve departs from the line by the width squared, a jump by anything within it.
        resolution = width * (width + min(fall, 1.0)) / 4
        if self._parts > 1 and not smooth:
            # Runs that have collapsed at the upper end say little of where they begin to.
            resolution += width / 2
        # What was lost in the first half of the runs may be lost once more.
        drift = (1 - share) * self._drift(low) / missing[0] + share * self._drift(high) / missing[1]
        resolution += min(drift / growth, _MOST_DRIFT) if growth > 0 else 0.0
        half += resolution
        interval = self._interval(root, half)
        if fall > _JUMP:
            # Where in the bracket attainment jumps is not known.
            interval = Interval(min(interval.low, low), interval.best, max(interval.high, high))
        return Goodput(
            interval,
            tuple(runs.tolist()),
            (low, high),
            resolution,
            tuple(found.values.tolist()) if smooth else (),
            found.shift_error if smooth else 0.0,
            monotone,
            resolved,
            requests,
        )

    def _interval(self, root: float, half: float) -> Interval:
        """Return the interval around a logarithm; its best estimate is not above the highest possible rate."""
        found = _around(root, half)
        best = min(found.best, self.limit_per_s)
        return Interval(min(found.low, best), best, found.high)

    def _noisier_end(self) -> float:
        """Return the side of the crossing whose attainment says less of where it is."""
        (low, at_low), (high, at_high) = self._bracket(self._means())
        curve = _Curve.through(low, at_low, high, at_high, self.target)
        here, there = (_deviation(self._corrected(rate)) for rate in (low, high))
        return low if here * curve.per_low > there * curve.per_high else high

    def _from_ends(self, low: float, high: float, *, monotone: bool, requests: int) -> Goodput:
        """Return the goodput where runs lie so far apart that they were added where they do, on one side only."""
        levels = []
        for rate in (low, high):
            drifts = self._drift(rate) > 0
            values = self._sustained(rate, drifts=drifts)
            levels.append(self._level(values, drifts=drifts))
        curve = _Curve.through(low, levels[0].best, high, levels[1].best, self.target)
        by_run = [found.values.reshape(-1, self._parts).mean(axis=1) for found in levels]
        # The crossing moves with every run's attainment on each side; runs on both sides saw the same requests.
        moves = np.zeros(self.runs)
        variances = []
        for values, worth in zip(by_run, (curve.per_low, curve.per_high), strict=True):
            count = len(values)
            moves[:count] += worth * (values - values.mean()) / math.sqrt(count * (count - 1))
            variances.append((worth**2 * float(values.var(ddof=1)) / count, count - 1))
        total = sum(variance for variance, _ in variances)
        degrees = total**2 / sum(variance**2 / df for variance, df in variances) if total > 0 else 1.0
        error = math.sqrt(float(moves @ moves))
        own = curve.root + sum(
            worth * (values[: self.replications] - values.mean())
            for values, worth in zip(by_run, (curve.per_low, curve.per_high), strict=True)
        )
        width, fall = math.log(high / low), levels[0].best - levels[1].best
        outside = max(math.log(low) - curve.root, curve.root - math.log(high), 0.0)
        resolution = width * (width + min(max(fall, 0.0), 1.0)) / 4 + width / 2 + outside
        half = student_t(self.sampling.confidence, max(1, math.floor(degrees))) * error + resolution
        interval = self._interval(curve.root, half)
        rates = tuple(own.tolist())
        return Goodput(interval, rates, (low, high), resolution, monotone=monotone, requests=requests)

    def _is_smooth(self, found: Level, crossings: Floats | None = None) -> bool:
        """Return whether stretches say how far apart runs lie.

        Args:
            found: the mean of what each stretch says of the crossing.
            crossings: what runs say of it by themselves, shape (runs,).
        """
        if self._parts == 1 or found.correlation > _ALIKE:
            return False
        by_run = found.values.reshape(-1, self._parts).mean(axis=1)
        apart = max(_deviation(by_run), 0.0 if crossings is None else _deviation(crossings))
        return apart <= _COLLAPSE * found.error * math.sqrt(len(by_run))

    def _at_anchor(self, *, drifts: bool) -> Floats:
        """Return the attainment of the replications run at the crossing only, by stretch, shape (more * stretches,)."""
        runs = [self.seen[self.anchor_per_s][i] for i in range(self.replications, self.runs)]
        values = np.array([run.stretches for run in runs])
        return (_second_half(values) if drifts else values).ravel()

    @property
    def is_cliff(self) -> bool:
        """Whether a rate that is higher by little misses many times what is allowed."""
        (low, at_low), (high, at_high) = self._bracket(self._means())
        if low == 0 or math.isinf(high):
            return True
        return at_low - at_high > _CLIFF * (1 - self.target) * math.log(high / low)

    @property
    def _is_bracketed(self) -> bool:
        """Whether there are runs on both sides of the crossing; there are none beyond the highest possible rate."""
        (low, _), (high, _) = self._bracket(self._means())
        return low > 0 and math.isfinite(high)

    @property
    def _jumps(self) -> bool:
        """Whether attainment falls from one side of the crossing to the other as if over a cliff."""
        (_, at_low), (_, at_high) = self._bracket(self._means())
        return at_low - at_high > _JUMP

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
            runs = self.replications
            values = [self._sustained(r)[: runs * self._parts] for r in (rate, faster)]
            rises = level(values[1] - values[0], runs=runs)
            if above > mean + 0.01 and rises.best > rises.half_width(0.99):
                return False
        return True


@dataclass(frozen=True, slots=True)
class _Curve:
    """Misses that grow exponentially with the rate, through two points on either side of the crossing.

    Args:
        root: log of the rate at which attainment is what it must be.
        per_low, per_high: how far that moves for attainment at the two rates.
    """

    root: float
    per_low: float
    per_high: float

    @classmethod
    def through(cls, low: float, at_low: float, high: float, at_high: float, target: float) -> _Curve:
        """Return the curve through the attainment at two rates."""
        missed = 1 - target
        first, last = (max(1 - value, missed / 100) for value in (at_low, at_high))
        width = math.log(high / low)
        rise = max(math.log(last / first), width)
        share = min(max(math.log(missed / first) / rise, -1.0), 2.0)
        return cls(math.log(low) + share * width, (1 - share) * width / rise / first, share * width / rise / last)


def more_replications(goodput: Goodput, precision: float, *, runs: int) -> int:
    """Return how many replications of the present length this half width takes, of which the bracket takes a part.

    Args:
        runs: replications that the goodput rests on.
    """
    noise = goodput.rate_per_s.half_width - goodput.resolution
    allowed = max(precision - goodput.resolution, precision / 2)
    return math.ceil(runs * min(noise / allowed, 1e3) ** 2)


def _is_repeated(goodput: Goodput) -> bool:
    """Return whether second halves stand for the first ones, too: then half of the stretches are known only."""
    by_run = np.array(goodput.log_stretches).reshape(len(goodput.log_rates), -1)
    half = by_run.shape[1] // 2
    return half > 0 and bool((by_run[:, :half] == by_run[:, by_run.shape[1] - half :]).all())


def _around(middle: float, half: float) -> Interval:
    """Return the interval around the exponential of a logarithm; beyond what floats hold it is open."""
    high = math.exp(middle + half) if middle + half < _LARGEST_LOG else math.inf
    return Interval(math.exp(middle - half), math.exp(middle), high)


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
