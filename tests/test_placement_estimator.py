"""The estimator and the runs it asks for: states that are rare, and numbers that can be worked out by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest

from dsim.errors import InputError
from dsim.job import Job
from dsim.options import Look, Window
from dsim.pools import Parallelism, Placement, Pool, Role
from dsim.recorder import Recorder
from dsim.slo import Slo
from placement.bounds import Bound
from placement.goodput import Ask, Estimator, Goodput, Observation, Sampling, more_replications, ratio
from placement.probe import Outcome
from placement.race import Entrant, Horizon, Race
from placement.runner import Runner
from placement.statistics import Controls, Interval, student_t

Probe = Callable[[float, int], Observation]


def finish(estimator: Estimator, probe: Probe) -> Goodput:
    """Run until nothing is asked for any more, and check what is asked."""
    for _ in range(400):
        if not (asks := estimator.ask()):
            break
        for ask in asks:
            assert 0 < ask.rate_per_s < math.inf
            assert ask.replication not in estimator.seen.get(ask.rate_per_s, {})
            estimator.tell(ask, probe(ask.rate_per_s, ask.replication))
    assert estimator.result is not None
    return estimator.result


def constant(value: float, parts: int = 16) -> Observation:
    """Return a run in which every stretch has the same attainment."""
    return Observation(value, late=value, stretches=(value,) * parts)


@pytest.mark.parametrize(("growth", "cliff"), [(20.0, False), (30.0, True)])
def test_a_cliff_is_misses_that_are_many_times_as_many_a_little_further(growth: float, cliff: bool) -> None:
    """Misses grow with a power of the rate: from 1 to 1.06 they grow to 3.2 and 5.7 times as many."""
    estimator = Estimator(0.9, 1.0, 2.0, Sampling(locate=2, replications=2, max_replications=2))
    for rate in (1.0, 1.06):
        for replication in (0, 1):
            estimator.tell(Ask(rate, replication), constant(max(1 - 0.09 * rate**growth, 0.0)))
    assert estimator.is_cliff is cliff
    assert Estimator(0.9, 1.0, 2.0, Sampling()).is_cliff


@pytest.mark.parametrize("seed", range(120))
def test_every_system_has_an_answer(seed: int) -> None:
    """Whatever attainment does, the estimator ends with an interval, and asks for no more runs than it may."""
    chosen = np.random.default_rng(seed)
    target = float(chosen.choice([0.3, 0.5, 0.9, 0.99]))
    steep, noise, apart = chosen.choice([0, 0.5, 12, 200]), chosen.choice([0, 0.02, 0.4]), chosen.choice([0, 0.02, 0.1])
    parts, drift, collapse = int(chosen.choice([0, 16])), chosen.choice([0, 0.1]), chosen.choice([0, 0.3])
    digits, limit = int(chosen.choice([1, 2, 12])), float(chosen.choice([1.0, 1.02, 3.0, math.inf]))

    def probe(rate: float, replication: int) -> Observation:
        own = np.random.default_rng([seed, replication])
        beyond = math.log(rate) + apart * own.normal()
        count = max(parts, 2)
        missed = (1 - target) * math.exp(min(steep * beyond, 50.0)) + drift * (np.arange(count) >= count / 2)
        values = np.clip(1 - missed + noise * own.normal(size=count), 0, 1)
        fails = own.random() < collapse and beyond > -0.05
        values = (values * np.linspace(1, 0.3, count) if fails else values).round(digits)
        late = float(values[count // 2 :].mean())
        told = tuple(values.tolist()) if parts else ()
        return Observation(float(values.mean()), not (fails and beyond > 0), late=late, stretches=told)

    controls = None
    if parts and chosen.random() < 0.5:
        controls = Controls(lambda i: np.random.default_rng([seed, i, 7]).normal(size=(16, 3)), np.eye(3) * 1e-4)
    first = Sampling(locate=int(chosen.choice([1, 2])), replications=int(chosen.choice([1, 2, 3])), max_replications=5)
    start = min(math.exp(chosen.normal() * chosen.choice([0.02, 0.5])), limit)
    estimator = Estimator(target, start, limit, first, controls, risky=bool(chosen.random() < 0.4))
    found = []
    for most in (5, 3, 16):
        goodput = finish(estimator, probe)
        assert 0 <= goodput.rate_per_s.low <= goodput.rate_per_s.best <= limit
        assert goodput.rate_per_s.best <= goodput.rate_per_s.high * (1 + 1e-12)
        assert estimator.runs <= max(most, 5)
        found.append(goodput)
        wanted = 3
        if goodput.log_rates and most == 3:
            wanted = min(more_replications(goodput, 0.02, runs=estimator.runs), 16)
        estimator.extend(Sampling(locate=1, replications=wanted, max_replications=wanted, close=True))
    for a in found:
        spread = ratio(a, found[-1])
        assert spread is None or spread.low <= spread.best <= spread.high


def test_runs_that_differ_at_the_highest_possible_rate_have_an_answer() -> None:
    """There is no far side of the crossing, of which nothing may be asked."""
    found = finish(Estimator(0.5, 0.9, 1.0, Sampling(2, 2, 5), risky=True), lambda _, i: constant(0.95 - 0.1 * (i % 3)))
    assert found.rate_per_s.best == pytest.approx(1.0, rel=2e-3)
    assert found.rate_per_s.best <= 1.0
    assert found.resolved


def test_a_search_that_never_fails_is_given_up_while_rates_are_numbers() -> None:
    found = finish(Estimator(0.9, 5.0), lambda _, i: Observation(0.95 + 0.01 * (i % 2)))
    assert not found.resolved
    assert 5e6 < found.rate_per_s.best < 1e11


def test_an_interval_wider_than_numbers_reach_is_open() -> None:
    """Attainment falls by next to nothing between two rates, and the runs lie far apart."""
    estimator = Estimator(0.9, 1.0, sampling=Sampling(2, 2, 2))
    seen = {1.0: (0.8000002, 1.0), 1.07: (0.8, 0.9999998)}
    estimator.seen = {rate: {i: Observation(v) for i, v in enumerate(values)} for rate, values in seen.items()}
    found = finish(estimator, lambda *_: pytest.fail("nothing is missing"))
    assert found.rate_per_s.low == 0.0
    assert math.isinf(found.rate_per_s.high)
    assert ratio(found, found) is not None


def test_goodputs_of_one_run_have_no_ratio() -> None:
    one = finish(Estimator(0.9, 4.0, 10.0, Sampling(1, 1, 1)), lambda rate, _: Observation(1.3 - rate / 10))
    assert (one.rate_per_s.low, one.rate_per_s.high) == (0.0, math.inf)
    assert ratio(one, one) is None


def test_runs_added_on_one_side_count_there_only() -> None:
    """Three runs on both sides, two more where they differ: the numbers of the curve through their means, by hand."""
    width, missed = 0.029, 0.1
    low, high = 4.0, 4.0 * math.exp(width)
    above, below = (0.95, 0.95, 0.95), (0.6, 0.9, 0.7, 0.8, 0.85)
    estimator = Estimator(0.9, low, sampling=Sampling(3, 5, 5), replications=3)
    estimator.replications, estimator.more, estimator.anchor_per_s, estimator.narrow = 3, 2, high, True
    estimator.seen = {
        low: {i: constant(value) for i, value in enumerate(above)},
        high: {i: constant(value) for i, value in enumerate(below)},
    }
    found = finish(estimator, lambda *_: pytest.fail("nothing is missing"))
    misses = 1 - float(np.mean(below))
    share = math.log(missed / 0.05) / math.log(misses / 0.05)
    assert found.rate_per_s.best == pytest.approx(low * math.exp(share * width))
    # Misses at the upper rate by one part more move the crossing down by this.
    moves = share * width / math.log(misses / 0.05) / misses
    noise = student_t(0.95, 4) * moves * float(np.std(below, ddof=1)) / math.sqrt(5)
    resolution = width * (width + misses - 0.05) / 4 + width / 2
    assert found.resolution == pytest.approx(resolution)
    assert math.log(found.rate_per_s.high / found.rate_per_s.best) == pytest.approx(noise + resolution)
    # What each of the runs on both sides points at, around the mean of all.
    assert np.diff(found.log_rates).tolist() == pytest.approx([moves * 0.3, -moves * 0.2])


def test_each_run_points_where_both_sides_of_it_say() -> None:
    """The crossing moves for a run's attainment as the curve through both means does, by finite differences."""
    width, step = 0.029, 1e-6
    low, high = 4.0, 4.0 * math.exp(width)
    above, below = np.array([0.97, 0.94, 0.94]), np.array([0.6, 0.9, 0.7, 0.8, 0.85])

    def root(at_low: float, at_high: float) -> float:
        return width * math.log(0.1 / (1 - at_low)) / math.log((1 - at_high) / (1 - at_low))

    estimator = Estimator(0.9, low, sampling=Sampling(3, 5, 5))
    estimator.replications, estimator.more, estimator.anchor_per_s, estimator.narrow = 3, 2, high, True
    for rate, values in ((low, above), (high, below)):
        estimator.seen[rate] = {i: constant(value) for i, value in enumerate(values.tolist())}
    found = finish(estimator, lambda *_: pytest.fail("nothing is missing"))
    means = float(above.mean()), float(below.mean())
    per_low = (root(means[0] + step, means[1]) - root(*means)) / step
    per_high = (root(means[0], means[1] + step) - root(*means)) / step
    pointed = math.log(low) + root(*means) + per_low * (above - means[0]) + per_high * (below[:3] - means[1])
    assert found.log_rates == pytest.approx(pointed.tolist(), abs=1e-6)


def test_added_runs_that_lift_the_highest_rate_over_the_target_leave_no_far_side() -> None:
    estimator = Estimator(0.9, 4.0, 4.0, Sampling(3, 5, 5))
    estimator.replications, estimator.more, estimator.anchor_per_s, estimator.narrow = 3, 2, 4.0, True
    estimator.seen = {
        3.9: {i: constant(0.97) for i in range(3)},
        4.0: {i: constant(value) for i, value in enumerate((0.8, 0.9, 0.92, 0.99, 0.99))},
    }
    found = finish(estimator, lambda *_: pytest.fail("nothing is missing"))
    assert found.rate_per_s.best == pytest.approx(4.0, rel=2e-3)


@pytest.mark.parametrize(("below", "above"), [(0.0001, 0.2), (0.03, 0.0001)])
def test_the_side_where_runs_differ_more_gets_more(below: float, above: float) -> None:
    def see(rate: float, replication: int) -> Observation:
        return constant(0.97 - below * replication if rate < 4.0 else 0.8 - above * replication)

    estimator = Estimator(0.9, 3.98, sampling=Sampling(3, 5, 5), risky=True)
    finish(estimator, lambda rate, i: see(rate, i % 3))
    assert (estimator.replications, estimator.more) == (3, 2)
    assert (estimator.anchor_per_s >= 4.0) == (above > below)


def test_runs_added_at_the_crossing_count_as_the_others_do() -> None:
    """Run i crosses at exp(apart[i]): the goodput is where all of them do in the mean, those at the crossing, too."""
    apart = (0.0, 0.004, -0.002, 0.006, 0.003)
    wave = tuple(0.03 * math.cos(2.5 * i) for i in range(16))

    def see(rate: float, replication: int) -> Observation:
        beyond = math.log(rate) - apart[replication]
        values = [1 - 0.1 * math.exp(12 * (beyond + 0.3 * w)) for w in wave]
        return Observation(float(np.mean(values)), late=None, stretches=tuple(values))

    estimator = Estimator(0.9, 0.98, sampling=Sampling(1, 5, 5))
    found = finish(estimator, see)
    extra = [rate for rate, runs in estimator.seen.items() if max(runs) == 4]
    assert extra == [estimator.anchor_per_s]
    assert sorted(estimator.seen[extra[0]]) == [1, 2, 3, 4]
    assert len(found.log_rates) == 5
    assert len(found.log_stretches) == 80
    assert np.subtract(found.log_rates, found.log_rates[0]).tolist() == pytest.approx(list(apart), abs=4e-4)
    assert math.log(found.rate_per_s.best) == pytest.approx(float(np.mean(found.log_rates)))


def test_replications_wanted_are_counted_from_those_behind_the_interval() -> None:
    wide = Goodput(Interval(0.961, 1.0, 1.039), (0.0, 0.0, 0.0), (0.99, 1.01))
    assert more_replications(wide, 0.02, runs=5) == 20


def test_ratios_do_not_count_a_second_half_twice() -> None:
    """Stretches whose second half stands for the first one, too, are half as many."""
    rng = np.random.default_rng(1)
    once = rng.normal(size=(2, 8)) * 0.01

    def goodput(stretches: np.ndarray) -> Goodput:
        runs = tuple(stretches.mean(axis=1).tolist())
        return Goodput(Interval(0.99, 1.0, 1.01), runs, (0.99, 1.01), log_stretches=tuple(stretches.ravel().tolist()))

    steady = goodput(rng.normal(size=(2, 16)) * 1e-12)
    twice = ratio(goodput(np.concatenate([once, once], axis=1)), steady)
    alone = ratio(goodput(once), goodput(rng.normal(size=(2, 8)) * 1e-12))
    assert twice is not None
    assert alone is not None
    assert twice.half_width == pytest.approx(alone.half_width)


def stops_after(window: Window, missing: range) -> int:
    """Return how many requests have missed when a run is stopped, 0 if it is not."""
    recorder = Recorder(window, track_itl=False, log_steps=False)
    for count, index in enumerate(missing, start=1):
        row = recorder.enter_one(0.0, 1, 1)
        recorder.reject(Job(index, row, 1, 1, 0, 1))
        if recorder.stopped_early:
            return count
    return 0


@pytest.mark.parametrize("warmup", [0, 70])
def test_misses_per_request_count_what_is_still_to_come(warmup: int) -> None:
    """20 misses of 100 are allowed, less one for ten that come after the last miss."""
    slo = Slo(ttft_s=1.0, tpot_s=1.0)
    hasty = Window(warmup, 100, slo, 20, 0.1)
    # After k misses in a row from the start 20 - (100 - k) / 10 are allowed: 11.1 after 11, 11.2 after 12.
    assert stops_after(hasty, range(warmup, warmup + 100)) == 12
    # Once the last one has missed, all 20 are.
    assert stops_after(hasty, range(warmup + 99, warmup - 1, -1)) == 21
    # Requests that do not count change nothing.
    assert stops_after(hasty, range(warmup)) == 0
    assert stops_after(Window(warmup, 100, slo, 20), range(warmup, warmup + 100)) == 21


def test_misses_per_request_need_a_number_of_requests() -> None:
    with pytest.raises(InputError, match=r"window: misses_per_request=0.1 needs counted"):
        Window(stop_slo=Slo(ttft_s=1.0, tpot_s=1.0), max_misses=5, misses_per_request=0.1)


def test_looks_judge_some_of_the_warmup() -> None:
    """4 misses of the requests 10 to 29 are allowed, less one for ten that come after the last miss."""
    slo = Slo(ttft_s=1.0, tpot_s=1.0)
    window = Window(50, 100, slo, 20, 0.1, Look(10, 20, 4))
    # After k misses in a row 4 - (20 - k) / 10 are allowed: 2.3 after 3.
    assert stops_after(window, range(10, 30)) == 3
    assert stops_after(window, range(29, 9, -1)) == 5
    # Neither the others of the warm-up nor the counted ones are its business.
    assert stops_after(window, range(10)) == 0
    assert stops_after(window, range(30, 50)) == 0
    assert stops_after(window, range(50, 150)) == 12
    recorder = Recorder(window, track_itl=False, log_steps=False)
    for index in (*range(10, 12), *range(50, 150)):
        recorder.reject(Job(index, recorder.enter_one(0.0, 1, 1), 1, 1, 0, 1))
        if recorder.done:
            break
    assert (recorder.stopped_early, recorder.stopped_in_warmup) == (True, False)


@pytest.mark.parametrize(
    ("look", "message"),
    [
        ((-1, 20, 4), "window: look.first=-1 must be >= 0"),
        ((10, 0, 4), "window: look.judged=0 must be >= 1"),
        ((40, 20, 4), "must lie within the warm-up"),
    ],
)
def test_looks_lie_within_the_warmup(look: tuple[int, int, int], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Window(50, 100, Slo(ttft_s=1.0, tpot_s=1.0), 20, look=Look(*look))


def test_one_replication_looks_for_the_rates_of_all_near_saturation() -> None:
    """The scout finds a bracket; then the others are run at its lower end, and at the upper one as that passes."""
    asked: list[tuple[float, int]] = []

    def see(rate: float, replication: int) -> Observation:
        asked.append((round(rate, 3), replication))
        edge = 1.0 - 0.01 * replication
        stretches = tuple(np.full(16, 0.95 if rate < edge else 0.5) + 0.001 * np.arange(16))
        return Observation(float(np.mean(stretches)), stretches=stretches)

    estimator = Estimator(0.9, 0.96, sampling=Sampling(1, 3, 3), risky=True, scout=2)
    found = finish(estimator, see)
    alone = next(i for i, (_, replication) in enumerate(asked) if replication != 2)
    assert alone >= 2
    low, high = (f(rate for rate, _ in asked[:alone]) for f in (min, max))
    assert low < 0.98 < high <= low * 1.0421
    assert asked[alone][0] == low
    assert 0.96 < found.rate_per_s.best < 1.0
    for rate in (low, high):
        assert {replication for seen, replication in asked if seen == rate} == {0, 1, 2}


def test_steps_go_where_two_rates_point() -> None:
    """Misses that grow slowly with the rate need longer steps than at the usual speed."""
    rates: list[float] = []

    def see(rate: float, replication: int) -> Observation:
        rates.append(rate)
        return Observation(1 - 0.1 * rate**5, stretches=tuple(1 - 0.1 * rate**5 for _ in range(16)))

    found = finish(Estimator(0.9, 0.85, sampling=Sampling(1, 2, 2)), see)
    assert found.rate_per_s.best == pytest.approx(1.0, abs=0.002)
    assert len(set(rates)) <= 4


def test_a_rate_that_just_meets_the_target_is_no_place_for_more_runs_on_one_side() -> None:
    """The crossing is then that very rate, which has been seen: the other runs are made on both sides."""

    # Of 300 such streams one in which the crossing is that rate to the last bit.
    seed = 217
    start_per_s = float(np.exp(np.random.default_rng(seed).uniform(-1, 3)))

    def see(rate: float, replication: int) -> Observation:
        rng = np.random.default_rng([seed, replication, int(rate * 1e6)])
        hits = 9000
        if (rate, replication) != (start_per_s, 0):
            hits = int(10_000 * (1 - 0.1 * math.exp(12 * math.log(rate / start_per_s)))) + int(rng.integers(-20, 20))
        base, wave = hits // 16, rng.integers(-10, 11, 8)
        values = np.full(16, base)
        values[: hits - 16 * base] += 1
        values = (values + np.concatenate([wave, -wave])) / 625
        return Observation(hits / 10_000, late=float(values[8:].mean()), stretches=tuple(values.tolist()))

    found = finish(Estimator(0.9, start_per_s, math.inf, Sampling(1, 2, 2, 0.05)), see)
    assert found.rate_per_s.best == pytest.approx(start_per_s, rel=0.02)
    assert math.isfinite(found.rate_per_s.high)


PLACEMENT = Placement((Pool(Role.PREFILL, 1, Parallelism(tp=1, pp=1)), Pool(Role.DECODE, 1, Parallelism(tp=1, pp=1))))


def test_runs_of_any_pace_count_the_same_requests() -> None:
    """What is not dropped as warm-up is skipped, so that the first counted request has the same number."""
    horizon = Horizon(600, 1600, 400, most_counted=5000, settling=100, stay_s=20.0, before=0.5, after=0.25)
    probes = [horizon.probe(PLACEMENT, 3.0, 2, pace_per_s=pace) for pace in (0.1, 10.0, 60.0, 1000.0)]
    assert {probe.skip + probe.warmup for probe in probes} == {600}
    assert [probe.warmup for probe in probes] == [101, 200, 600, 600]
    assert [probe.counted for probe in probes] == [1600, 1600, 2400, 5000]
    assert [probe.tail for probe in probes] == [1, 50, 300, 400]
    assert {(probe.rate_per_s, probe.replication) for probe in probes} == {(3.0, 2)}
    whole = Horizon(0, 300).probe(PLACEMENT, 3.0, 0, pace_per_s=5.0)
    assert (whole.warmup, whole.counted, whole.tail, whole.skip) == (0, 300, 0, 0)


def test_a_pool_whose_run_broke_off_is_not_taken_as_too_slow() -> None:
    short = Horizon(0, 100)
    race = Race(Runner.__new__(Runner), 0.9, short, short, short, Sampling())
    entrant = Entrant(PLACEMENT, (Bound("bound", 10.0),))
    examination = race._check_prefill(entrant, 1.0)
    next(examination)
    with pytest.raises(StopIteration):
        examination.send([Outcome(Observation(0.0, stable=False), failure="out of range")])
    assert entrant.failed == 5.0
    assert math.isinf(race.pools[PLACEMENT.pool(Role.PREFILL)].failed)
