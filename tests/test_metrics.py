"""Statistics over the columns of a run, and relations between runs that differ in one thing."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.circuit import Circuit
from dsim.cruise import AffineCruise, TableCruise
from dsim.metrics import Distribution, Saturation, backlog, saturation_of, weighted_distribution
from dsim.options import Options, Window
from dsim.pools import Placement, Role
from dsim.profile import BatchLimits
from dsim.recorder import Gaps
from dsim.result import Result
from dsim.simulate import simulate
from dsim.workload import ClosedLoop, Fixed, Poisson, Workload
from tests.distserve import needs_data, replay, runs
from tests.reference.systems import every_role, make_profile, make_trace
from tests.test_twin import System, systems

# Distributions


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), max_size=60))
def test_a_distribution_is_numpys_with_nan_left_out(values: list[float]) -> None:
    sample = np.array(values, dtype=np.float64)
    found = Distribution.of(sample)
    known = sample[~np.isnan(sample)]
    if not len(known):
        assert all(math.isnan(value) for value in found.to_dict().values())
        return
    assert found.mean == known.mean()
    for share, value in ((50, found.p50), (90, found.p90), (95, found.p95), (99, found.p99)):
        assert value == np.percentile(known, share)


def test_a_distribution_has_five_names() -> None:
    assert list(Distribution.of(np.arange(3.0)).to_dict()) == ["mean", "p50", "p90", "p95", "p99"]


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 9)), max_size=30),
    st.lists(st.tuples(st.integers(1, 500), st.integers(0, 5), st.integers(1, 40), st.integers(1, 9)), max_size=10),
)
def test_percentiles_of_gaps_are_numpys_over_the_expanded_sample(
    single: list[tuple[int, int]], series: list[tuple[int, int, int, int]]
) -> None:
    gaps, sample = Gaps(), []
    for gap, weight in single:
        gaps.add(gap / 1024, weight)
        sample += [gap / 1024] * weight
    for first, growth, steps, weight in series:
        gaps.add_run(first / 1024, growth / 1024, steps, weight)
        sample += [(first + growth * k) / 1024 for k in range(steps)] * weight
    found = weighted_distribution(gaps)
    if not sample:
        assert math.isnan(found.mean)
        return
    assert found.mean == pytest.approx(np.mean(sample), rel=1e-12)
    for share, value in ((50, found.p50), (90, found.p90), (95, found.p95), (99, found.p99)):
        assert value == pytest.approx(np.percentile(sample, share), rel=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_gaps_of_a_cruise_are_those_between_its_ends(steps: int) -> None:
    times = np.linspace(0.25, 2.625, 20, dtype=np.float64)
    for course in (AffineCruise(3.0, 0.25, 0.125), TableCruise(3.0, times)):
        gaps = Gaps()
        if steps > 1:
            gaps.add_course(course, steps, weight=2)
        found = weighted_distribution(gaps)
        expected = np.repeat(times[1:steps], 2)
        assert found == Distribution.of(expected) or (steps == 1 and math.isnan(found.mean))


# Saturation


def md1(load: float, num_requests: int, seed: int) -> Result:
    """Simulate an M/D/1 prefill instance at a share of its capacity, drained."""
    profile = make_profile(prefill=(1024.0, 0.0, 0.0), limits={Role.PREFILL: BatchLimits(requests=1)})
    workload = Workload(Poisson(), Fixed(1, 2))
    trace = workload.trace(rate_per_s=load, num_requests=num_requests, seed=seed, context_tokens=4096)
    placement = Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1")
    return simulate(placement, trace, profiles=every_role(profile), options=Options(track_itl=False))


def shares(load: float, num_requests: int, seeds: int) -> dict[Saturation, float]:
    """Return how often runs of a load are given each flag."""
    flags = Counter(md1(load, num_requests, seed).saturation for seed in range(seeds))
    return {flag: flags[flag] / seeds for flag in Saturation}


def test_light_load_is_stable() -> None:
    assert shares(0.3, 300, 20)[Saturation.STABLE] == shares(0.5, 300, 40)[Saturation.STABLE] == 1.0


def test_moderate_load_is_never_called_overloaded() -> None:
    assert shares(0.7, 300, 200)[Saturation.OVERLOADED] < 0.01


def test_load_near_capacity_is_not_called_stable() -> None:
    found = shares(0.97, 2000, 20)
    assert found[Saturation.STABLE] == 0.0
    assert found[Saturation.NEAR_KNEE] > 0.6


def test_overload_shows_in_short_runs_that_drain() -> None:
    found = shares(1.2, 300, 100)
    assert found[Saturation.OVERLOADED] > 0.9
    assert found[Saturation.STABLE] == 0.0
    assert shares(1.3, 300, 50)[Saturation.OVERLOADED] > 0.97


def test_slight_overload_shows_in_longer_runs_and_never_looks_stable() -> None:
    assert shares(1.05, 300, 50)[Saturation.STABLE] < 0.1
    found = shares(1.05, 6000, 10)
    assert found[Saturation.OVERLOADED] > 0.7
    assert found[Saturation.STABLE] == 0.0


def test_a_decode_side_that_cannot_keep_up_is_overload() -> None:
    """Prompts wait on the prefill side for decode memory."""
    profile = make_profile(prefill=(1.0, 0.0, 0.0), decode=(8.0, 0.0, 1.0), kv_tokens=512)
    placement = Placement.parse("1xP:tp4pp1 + 1xD:tp1pp1")
    flags = []
    for rate_per_s in (1.0, 12.0):
        trace = Workload(Poisson(), Fixed(60, 60)).trace(
            rate_per_s=rate_per_s, num_requests=300, seed=1, context_tokens=4096
        )
        flags.append(simulate(placement, trace, profiles=every_role(profile)).saturation)
    assert flags == [Saturation.STABLE, Saturation.OVERLOADED]


@pytest.mark.parametrize("users", [4, 32])
def test_a_closed_loop_is_never_overloaded(users: int) -> None:
    """Its backlog is bounded; that it fills up at first is not growth."""
    profile = make_profile(prefill=(1024.0, 0.0, 0.0), limits={Role.PREFILL: BatchLimits(requests=1)})
    loop = ClosedLoop(users=users, lengths=Fixed(10, 3), num_requests=10 * users)
    result = simulate(Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1"), loop, profiles=every_role(profile))
    assert result.saturation is not Saturation.OVERLOADED


def test_too_few_requests_tell_nothing() -> None:
    assert md1(5.0, 10, 1).saturation is Saturation.STABLE


def test_runs_in_which_everything_is_rejected_are_overloaded() -> None:
    trace = make_trace(range(40), [100] * 40, [2] * 40)
    placement = Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1")
    result = simulate(placement, trace, profiles=every_role(make_profile(kv_tokens=32)))
    assert result.columns["rejected"].all()
    assert saturation_of(result.columns, slice(0, 40)) is Saturation.OVERLOADED


def test_the_backlog_counts_who_waits_for_prefill_or_decode() -> None:
    nan = np.nan
    columns = {
        "arrival_s": np.array([0.0, 1.0, 2.0, 3.0]),
        "rejected": np.array([False, False, False, True]),
        "prefill_start_s": np.array([0.0, 2.5, 2.5, nan]),
        "prefill_end_s": np.array([1.5, 4.0, 4.0, nan]),
        "transfer_start_s": np.array([2.2, 4.0, 4.0, nan]),
        "transfer_end_s": np.array([2.4, 4.5, 4.5, nan]),
        "decode_start_s": np.array([2.5, 5.0, 5.0, nan]),
    }
    # At 2 s the first waits for decode, the second and third for prefill; at 3 s nobody does.
    assert backlog(columns).tolist() == [0, 1, 3, 0]


@pytest.mark.parametrize("start_s", [1.0, 0.0])
def test_a_transfer_that_overlaps_its_prefill_does_not_shorten_the_waits(start_s: float) -> None:
    """Prefill 1 s, 0.1 s of transfer left then, a wait of 3.5 s: more than three times prefill and token."""
    n = 200
    arrival_s = 10.0 * np.arange(n)
    after_s = {"prefill_start_s": 0.0, "prefill_end_s": 1.0, "transfer_start_s": start_s, "transfer_end_s": 1.1}
    after_s |= {"decode_start_s": 4.6, "first_token_s": 1.0, "last_token_s": 1.01}
    columns = {name: arrival_s + seconds for name, seconds in after_s.items()}
    columns |= {"arrival_s": arrival_s, "output_tokens": np.full(n, 2), "rejected": np.zeros(n, dtype=bool)}
    assert saturation_of(columns, slice(0, n)) is Saturation.NEAR_KNEE


@needs_data
def test_saturation_of_real_traffic() -> None:
    """OPT-13B runs of DistServe: capacity lies between 4.5 and 6 requests/s; of its vLLM between 3 and 4."""
    flags = {run.name: replay(run).saturation for kind in ("c21d11", "vllm") for run in runs(kind)}
    assert flags["c21d11-300-3rps"] is flags["c21d11-300-4.5rps"] is flags["vllm-200-2rps"] is Saturation.STABLE
    for name in ("c21d11-300-9rps", "c21d11-300-12rps", "c21d11-600-6rps", "c21d11-1200-12rps", "vllm-400-4rps"):
        assert flags[name] is Saturation.OVERLOADED, name


# Utilization


@given(systems(dyadic=False), st.integers(1, 25))
@settings(max_examples=60)
def test_utilization_is_the_busy_share_of_the_time_until_the_run_ends(system: System, counted: int) -> None:
    """Steps under way when the run ends count as far as they have come: what the log of steps says of pp 1."""
    asked: dict[str, Any] = {"profiles": system.profiles, "window": Window(counted=counted)}
    options = replace(system.options, check=False)
    found = simulate(system.placement, system.trace, **asked, options=options)
    logged = simulate(system.placement, system.trace, **asked, options=replace(options, log_steps=True))
    assert found.elapsed_s == pytest.approx(logged.elapsed_s, rel=1e-12)
    assert found.utilization == pytest.approx(logged.utilization, rel=1e-9, abs=1e-12)
    assert logged.steps is not None
    end_s = logged.elapsed_s
    for pool in system.placement.pools:
        share = logged.utilization[pool.role]
        assert 0 <= share <= 1
        steps = [step for step in logged.steps if step.role == pool.role.value]
        if pool.parallelism.pp == 1 and end_s:
            busy_s = sum(min(step.end_s, end_s) - step.launch_s for step in steps)
            assert share == pytest.approx(busy_s / pool.count / end_s, rel=1e-9, abs=1e-12)


def test_what_is_under_way_when_a_run_ends_counts_as_far_as_it_has_come() -> None:
    """Prefills of 1 s and decodes of 1/8 s a step: the run ends at 1.125 s, an eighth into the second prefill."""
    profile = make_profile(
        prefill=(1024.0, 0.0, 0.0), decode=(128.0, 0.0, 0.0), limits={Role.PREFILL: BatchLimits(requests=1)}
    )
    trace = make_trace([0.0, 0.0, 0.0], [16, 16, 16], [2, 9, 9])
    placement = Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1")
    found = simulate(placement, trace, profiles=every_role(profile), window=Window(counted=1))
    assert found.elapsed_s == 1.125
    assert found.utilization == {Role.PREFILL: 1.0, Role.DECODE: 0.125 / 1.125}


@pytest.mark.parametrize(
    ("second", "busy"),
    [
        # The second batch waits for the first stage, which has no rest from 1 s to 9 s.
        ((2.0, 0.5), {2.25: 1.25, 3.0: 2.0, 6.0: 5.0, 9.0: 8.0, 11.0: 8.0}),
        # The first stage rests from 5 s until the second hold ends, at 6.5 s.
        ((5.5, 1.0), {5.5: 4.0, 6.0: 4.0, 7.0: 4.5, 11.0: 8.0}),
        # The second hold ends at 8 s, after more work of the driver than of the first stage.
        ((1.5, 6.5), {2.0: 1.5, 4.0: 3.5, 8.0: 7.5, 9.0: 7.5, 12.0: 8.0}),
    ],
)
def test_driver_and_first_stage_are_busy_up_to_an_instant(
    second: tuple[float, float], busy: dict[float, float]
) -> None:
    """Holds of 1 s and those given, and 4 s in each of two stages: the busier of the two."""
    circuit = Circuit(parts=2, stages=2)
    circuit.launch(0, 0.0, hold_s=1.0, kernel_s=8.0)
    assert [circuit.busy_until_s(at_s) for at_s in (0.0, 0.5, 1.0, 2.5, 9.0)] == [0.0, 0.5, 1.0, 1.5, 4.0]
    launch_s, hold_s = second
    circuit.launch(1, launch_s, hold_s=hold_s, kernel_s=8.0)
    assert {at_s: circuit.busy_until_s(at_s) for at_s in busy} == busy
