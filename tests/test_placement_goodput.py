"""Goodput of queues whose truth is known, and the statistics behind the interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from placement.goodput import Ask, Estimator, Goodput, Observation, Sampling, estimate, ratio
from placement.statistics import Interval, level, mean_interval, stretches, student_t
from tests.coverage_counts import SAMPLINGS, count

#: Utilisation at which 90 % of the customers of an M/D/1 queue leave within two service times: (1 - r) e^r = 0.9.
RHO = 0.391_655
SERVICE_S = 0.1


class FifoServer:
    """A FIFO server with equal service times, by Lindley's recursion; the truth of one replication."""

    def __init__(self, seed: int, *, requests: int = 3000, warmup: int = 500, limit_s: float = 2 * SERVICE_S) -> None:
        self.seed, self.requests, self.warmup, self.limit_s = seed, requests, warmup, limit_s
        self.probes = 0

    def __call__(self, rate_per_s: float, replication: int) -> Observation:
        self.probes += 1
        rng = np.random.default_rng([self.seed, replication])
        gaps_s = rng.standard_exponential(self.requests + self.warmup) / rate_per_s
        work_s = np.concatenate([[0.0], np.cumsum(SERVICE_S - gaps_s[1:])])
        sojourn_s = work_s - np.minimum.accumulate(work_s) + SERVICE_S
        met = sojourn_s[self.warmup :] <= self.limit_s + 1e-12
        return Observation(float(met.mean()), stable=rate_per_s * SERVICE_S < 1, requests=len(gaps_s))


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_student_t_is_scipys(confidence: float) -> None:
    for degrees in [*range(1, 12), 39, 200]:
        assert student_t(confidence, degrees) == pytest.approx(stats.t.ppf((1 + confidence) / 2, degrees), rel=1e-9)


def test_mean_interval() -> None:
    spread = mean_interval([1.0, 2.0, 3.0], confidence=0.95)
    low, high = stats.t.interval(0.95, 2, loc=2.0, scale=1 / math.sqrt(3))
    assert (spread.low, spread.best, spread.high) == pytest.approx((low, 2.0, high))
    assert mean_interval([1.0], confidence=0.95) == Interval(-math.inf, 1.0, math.inf)


def test_md1_goodput_is_covered_as_often_as_stated() -> None:
    sampling = Sampling(replications=4, max_replications=12, precision=0.03)
    covered, widths = 0, []
    for seed in range(150):
        found = estimate(FifoServer(seed), target=0.9, start_per_s=4.6, limit_per_s=10.0, sampling=sampling)
        covered += found.rate_per_s.low <= RHO / SERVICE_S <= found.rate_per_s.high
        widths.append(found.rate_per_s.half_width)
        assert found.resolved
        assert found.monotone
    # 95 % of 150 are 142.5 with a standard deviation of 2.7.
    assert covered >= 134
    assert np.mean(widths) < 0.035


@pytest.mark.parametrize("start_per_s", [0.05, 1.0, 9.9])
def test_the_start_does_not_matter(start_per_s: float) -> None:
    found = estimate(FifoServer(3), target=0.9, start_per_s=start_per_s, limit_per_s=10.0)
    assert found.rate_per_s.low <= RHO / SERVICE_S <= found.rate_per_s.high


def test_without_a_latency_limit_goodput_is_the_stability_limit() -> None:
    found = estimate(FifoServer(1, limit_s=1e9), target=0.9, start_per_s=2.0)
    assert found.rate_per_s.low <= 1 / SERVICE_S <= found.rate_per_s.high
    assert found.rate_per_s.half_width < 0.02
    # A rate that is not sustained does not count, however good it looks.
    assert found.rate_per_s.best <= 1.01 / SERVICE_S


def test_nothing_is_sustained_where_no_request_meets_its_limit() -> None:
    found = estimate(FifoServer(1, limit_s=SERVICE_S / 2), target=0.9, start_per_s=5.0, limit_per_s=10.0)
    assert found.rate_per_s.best == found.rate_per_s.low == 0.0
    assert 0 < found.rate_per_s.high <= 0.02
    assert found.log_rates == ()


@given(st.floats(0.5, 20.0), st.floats(0.3, 3.0))
def test_a_jump_is_bracketed_and_never_of_zero_width(root: float, guess: float) -> None:
    found = estimate(
        lambda rate, _: Observation(1.0 if rate <= root else 0.0),
        target=0.9,
        start_per_s=root * guess,
        limit_per_s=100.0,
    )
    assert found.rate_per_s.low <= root <= found.rate_per_s.high
    assert 0 < found.rate_per_s.half_width <= 0.02


@given(st.floats(0.5, 20.0), st.floats(0.2, 5.0), st.floats(1.0, 12.0))
def test_a_smooth_fall_without_noise_is_found_exactly(root: float, guess: float, slope: float) -> None:
    def probe(rate: float, _: int) -> Observation:
        return Observation(1 / (1 + math.exp(slope * math.log(rate / root)) / 9))

    found = estimate(probe, target=0.9, start_per_s=root * guess)
    assert found.rate_per_s.best == pytest.approx(root, rel=0.005)
    assert found.rate_per_s.low <= root * 1.0001
    assert found.rate_per_s.high >= root * 0.9999
    assert found.rate_per_s.half_width > 0


def test_a_bracket_that_rises_again_is_noticed() -> None:
    def probe(rate: float, replication: int) -> Observation:
        hump = 0.3 if 3.9 < rate < 4.1 else 0.0
        return Observation(min(1.0, max(0.0, 1.3 - rate / 10 - hump)) - 0.001 * replication)

    estimator = Estimator(0.9, 4.0, sampling=Sampling(locate=4, replications=4))
    for rate in (3.0, 4.0, 4.5):
        for i in range(4):
            estimator.tell(Ask(rate, i), probe(rate, i))
    while asks := estimator.ask():
        for ask in asks:
            estimator.tell(ask, probe(ask.rate_per_s, ask.replication))
    assert estimator.result is not None
    assert not estimator.result.monotone


def test_more_replications_reuse_the_runs_there_are() -> None:
    server = FifoServer(5)
    estimator = Estimator(0.9, 4.0, 10.0, Sampling(locate=1, replications=1, max_replications=1))

    def finish() -> Goodput:
        while asks := estimator.ask():
            for ask in asks:
                estimator.tell(ask, server(ask.rate_per_s, ask.replication))
        assert estimator.result is not None
        return estimator.result

    one = finish()
    assert math.isinf(one.rate_per_s.high)
    before = server.probes
    estimator.extend(Sampling(locate=1, replications=4, max_replications=4))
    four = finish()
    assert len(four.log_rates) == 4
    assert server.probes - before <= 12
    assert four.rate_per_s.half_width < 0.2


def test_paired_ratio_is_narrower_than_its_parts() -> None:
    sampling = Sampling(replications=8, max_replications=8)
    a = estimate(FifoServer(2), target=0.9, start_per_s=4.0, limit_per_s=10.0, sampling=sampling)
    b = estimate(
        FifoServer(2, limit_s=2.2 * SERVICE_S), target=0.9, start_per_s=4.0, limit_per_s=10.0, sampling=sampling
    )
    spread = ratio(b, a)
    assert spread is not None
    assert spread.low > 1.0
    assert spread.half_width < a.rate_per_s.half_width + b.rate_per_s.half_width
    same = ratio(a, a)
    assert same is not None
    assert same.low < 1.0 < same.high
    assert ratio(a, Goodput(Interval(0.0, 0.0, 1.0), (), (0.0, 1.0))) is None


def test_the_ratio_is_covered_with_unequal_replications() -> None:
    rng = np.random.default_rng(0)
    covered, tries, correlation = 0, 400, 0.95

    def goodput(logs: list[float]) -> Goodput:
        return Goodput(Interval(0.9, math.exp(float(np.mean(logs))), 1.1), tuple(logs), (0.9, 1.1))

    for _ in range(tries):
        shared = rng.normal(size=10) * math.sqrt(correlation)
        x, y = (0.03 * (shared + rng.normal(size=10) * math.sqrt(1 - correlation)) for _ in range(2))
        spread = ratio(goodput(list(x)), goodput(list(y[:4])))
        assert spread is not None
        covered += spread.low <= 1.0 <= spread.high
    # 95 % of 400 are 380 with a standard deviation of 4.4.
    assert 364 <= covered <= 395


def test_second_halves_that_are_worse_count_and_widen_the_interval() -> None:
    def probe(drift: float) -> Goodput:
        def see(rate: float, replication: int) -> Observation:
            attained = 1.3 - rate / 10 + 0.001 * replication
            return Observation(attained, late=attained - drift)

        return estimate(see, target=0.9, start_per_s=4.0, sampling=Sampling(replications=4, max_replications=4))

    steady, drifting = probe(0.0), probe(0.01)
    assert steady.rate_per_s.best == pytest.approx(4.0, rel=0.01)
    assert drifting.rate_per_s.best == pytest.approx(3.9, rel=0.01)
    assert drifting.resolution > steady.resolution + 0.015


@pytest.mark.parametrize("name", ["one run", "2 %, at least two runs"])
def test_stretches_and_controls_cover_as_often_as_stated(name: str) -> None:
    """A sample of `python -m tests.coverage_counts`: 95 % of 40 are 38 with a standard deviation of 1.4."""
    with_controls = count(name, SAMPLINGS[name], seeds=range(1000, 1040))
    assert with_controls.within >= 34
    assert with_controls.error < 0.03


def test_controls_make_intervals_narrower_and_estimates_better() -> None:
    plain = count("two runs", SAMPLINGS["two runs"], seeds=range(1000, 1020), controlled=False)
    controlled = count("two runs", SAMPLINGS["two runs"], seeds=range(1000, 1020))
    assert controlled.half_width < 0.75 * plain.half_width
    assert controlled.error < 0.8 * plain.error


def test_level_of_stretches_alike_is_students() -> None:
    values = np.array([1.0, 2.0, 4.0, 2.5])
    found, whole = level(values, runs=4), mean_interval(values.tolist(), confidence=0.9)
    assert (found.best, found.half_width(0.9)) == pytest.approx((whole.best, whole.high - whole.best))


def test_neighbours_alike_widen_the_interval() -> None:
    """Autocorrelated stretches: the interval of their mean holds 0 about as often as stated, not much less often."""
    rng = np.random.default_rng(0)
    within = naive = 0
    for _ in range(400):
        noise = rng.normal(size=(4, 17))
        values = (noise[:, 1:] + 0.6 * noise[:, :-1]).ravel()
        within += abs(level(values, runs=4).best) <= level(values, runs=4).half_width(0.95)
        naive += abs(values.mean()) <= student_t(0.95, 63) * float(values.std(ddof=1)) / 8
    # 95 % of 400 are 380 with a standard deviation of 4.4.
    assert naive < 350
    assert within >= 366


def test_controls_are_subtracted_and_their_own_error_counts() -> None:
    rng = np.random.default_rng(1)
    departures = rng.normal(size=(64, 2))
    values = 3.0 + departures @ np.array([0.5, -0.2]) + 0.01 * rng.normal(size=64)
    exact = level(values, runs=4, controls=departures)
    assert exact.best == pytest.approx(3.0, abs=4 * 0.01 / 8)
    assert exact.error < 0.003
    vague = level(values, runs=4, controls=departures, covariance=np.diag([0.01, 0.0]))
    assert vague.error == pytest.approx(math.hypot(exact.error, 0.05), rel=0.01)
    constant = level(values, runs=4, controls=np.ones((64, 1)))
    assert constant.best == pytest.approx(values.mean())


def test_runs_that_collapse_before_others_say_themselves_how_far_apart_they_lie() -> None:
    """Smooth stretches within runs that differ: the width is that of whole runs, of which there are at least three."""

    def probe(rate: float, replication: int) -> Observation:
        attained = 1.3 - rate / 10 + 0.02 * (replication - 0.5)
        return Observation(attained, stretches=tuple(attained + 0.0001 * (i % 3 - 1) for i in range(16)))

    found = estimate(probe, target=0.9, start_per_s=4.0, sampling=Sampling(2, 2, 2))
    assert len(found.log_rates) >= 3
    assert found.log_stretches == ()
    assert found.rate_per_s.half_width > 0.05


def test_second_half_stretches_count_where_the_queues_still_fill() -> None:
    def probe(rate: float, replication: int) -> Observation:
        parts = [1.3 - rate / 10 + (0.02 if i < 8 else 0.0) + 0.001 * (i % 2) for i in range(16)]
        return Observation(float(np.mean(parts)), late=float(np.mean(parts[8:])), stretches=tuple(parts))

    found = estimate(probe, target=0.9, start_per_s=4.0, sampling=Sampling(2, 2, 2))
    assert found.rate_per_s.best == pytest.approx(4.0, rel=0.01)
    assert found.resolution > 0.01
    assert stretches(np.arange(5.0), 2).tolist() == [0.5, 2.5]
