"""The simulator against recursions and queueing formulas, and the formulas against the paper."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq

from dsim.latency import AffineLatency, AffinePrefill, HostOverhead
from dsim.options import Options
from dsim.pools import Placement, Role
from dsim.profile import BatchLimits, Profile
from dsim.result import Result
from dsim.simulate import simulate
from dsim.trace import Trace
from dsim.workload import Fixed, Lengths, LogNormal, Poisson, Workload
from placement.queueing import (
    decode_mean_step_s,
    md1_goodput_per_s,
    md1_mean_ttft_s,
    md1_waiting_cdf,
    parallelism_crossover_per_s,
    speedup_mean_ttft_s,
    two_stage_mean_ttft_s,
)
from tests.reference.systems import TICK_S, every_role, make_profile, make_trace

Floats = NDArray[np.float64]

ONE_AT_A_TIME = {Role.PREFILL: BatchLimits(requests=1)}


def prefill_alone(trace: Trace, profile: Profile, *, pool: str = "1xP:tp1pp1") -> Result:
    """Simulate the prefill side, its laws checked."""
    placement = Placement.parse(f"{pool} + 1xD:tp1pp1")
    options = Options(track_itl=False, check=True)
    return simulate(placement, trace, profiles=every_role(profile), options=options, phase=Role.PREFILL)


def lindley(arrival_s: Floats, service_s: Floats) -> list[float]:
    """Return the departures of a first come, first served queue: d = max(a, d of the one before) + s."""
    departures, last_s = [], 0.0
    for a, s in zip(arrival_s.tolist(), service_s.tolist(), strict=True):
        last_s = max(a, last_s) + s
        departures.append(last_s)
    return departures


# Sample paths


def test_a_fifo_prefill_instance_is_lindleys_recursion_over_100000_requests() -> None:
    lengths = LogNormal(prompt_mean=700.0, prompt_cv=1.2, output_mean=2.0, output_cv=0.5)
    trace = Workload(Poisson(), lengths).trace(rate_per_s=1.05, num_requests=100_000, seed=3, context_tokens=1 << 14)
    host = {Role.PREFILL: HostOverhead(step_s=0.0021, sequence_s=1.7e-4, token_s=1.1e-7)}
    profile = make_profile(prefill=(17.3, 1.27, 1.3e-5), host=host, limits=ONE_AT_A_TIME)
    result = prefill_alone(trace, profile)
    p = trace.prompt_tokens.astype(np.float64)
    service_s = (17.3 + 1.27 * p + 1.3e-5 * p * p) * TICK_S + (0.0021 + 1.7e-4 + 1.1e-7 * p)
    assert 0.9 < float(np.mean(service_s)) * 1.05 < 1.1
    expected = lindley(trace.arrival_s, service_s)
    np.testing.assert_allclose(result.columns["first_token_s"], expected, rtol=0, atol=1e-10)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=200),
    st.integers(1, 64),
    st.integers(0, 3),
)
def test_it_is_lindleys_recursion_bit_for_bit_with_dyadic_times(
    requests: list[tuple[int, int]], constant: int, per_token: int
) -> None:
    gaps, prompts = zip(*requests, strict=True)
    trace = make_trace(np.cumsum(gaps).astype(float).tolist(), prompts, [1] * len(prompts))
    profile = make_profile(prefill=(float(constant), float(per_token), 0.0), limits=ONE_AT_A_TIME)
    service_s = (constant + per_token * trace.prompt_tokens.astype(np.float64)) * TICK_S
    result = prefill_alone(trace, profile)
    assert result.columns["first_token_s"].tolist() == lindley(trace.arrival_s, service_s)


def test_two_stages_are_lindleys_recursion_twice() -> None:
    trace = Workload(Poisson(), Fixed(1, 1)).trace(rate_per_s=1.7, num_requests=20_000, seed=3, context_tokens=4096)
    result = prefill_alone(trace, make_profile(prefill=(1024.0, 0.0, 0.0), limits=ONE_AT_A_TIME), pool="1xP:tp1pp2")
    half_s = np.full(len(trace), 0.5)
    expected = lindley(np.array(lindley(trace.arrival_s, half_s)), half_s)
    assert result.columns["first_token_s"].tolist() == expected


# Means, with confidence intervals


def interval(samples: list[Floats], *, warmup: int, batches: int = 25) -> tuple[float, float]:
    """Return the mean over several runs and the half width of its 99.9 % interval, from means of batches.

    Batches are thousands of requests long, so that their means are nearly independent.
    """
    means = np.concatenate([[b.mean() for b in np.array_split(sample[warmup:], batches)] for sample in samples])
    # 3.43 is Student's t at 99.9 % for 75 batches, the fewest that are used.
    return float(means.mean()), 3.43 * float(means.std(ddof=1)) / math.sqrt(len(means))


def assert_mean(samples: list[Floats], expected: float, *, bias: float = 0.0) -> None:
    """Assert that the theoretical mean lies in the interval, and that the interval is narrower than 1 % each way.

    Args:
        bias: share of the mean by which the formula, exact only in a limit, may be off.
    """
    mean, half_width = interval(samples, warmup=2000)
    assert half_width < 0.01 * expected
    assert abs(mean - expected) < half_width + bias * expected


def one_second_profile(*, tp_speedup: float = 1.0) -> Profile:
    """Return a profile whose prefill takes a second at TP 1, one request at a time."""
    profile = make_profile(prefill=(1024.0, 0.0, 0.0), limits=ONE_AT_A_TIME)
    latency = dict(profile.latency)
    assert isinstance(latency[2], AffineLatency)
    latency[2] = dataclasses.replace(latency[2], prefill=AffinePrefill(1.0 / tp_speedup, 0.0, 0.0))
    return dataclasses.replace(profile, latency=latency)


def ttfts(load: float, *, pool: str, profile: Profile, num_requests: int = 100_000) -> list[Floats]:
    """Return the TTFTs of three long runs of Poisson arrivals."""
    workload = Workload(Poisson(), Fixed(1, 1))
    traces = (
        workload.trace(rate_per_s=load, num_requests=num_requests, seed=seed, context_tokens=4096) for seed in (1, 2, 3)
    )
    return [prefill_alone(trace, profile, pool=pool).ttft_s for trace in traces]


def test_mean_ttft_of_md1() -> None:
    assert_mean(ttfts(0.5, pool="1xP:tp1pp1", profile=one_second_profile()), md1_mean_ttft_s(0.5, 1.0))


def test_mean_ttft_of_two_stages() -> None:
    assert_mean(ttfts(1.3, pool="1xP:tp1pp2", profile=one_second_profile()), two_stage_mean_ttft_s(1.3, 1.0))


def test_mean_ttft_with_a_tp_speedup() -> None:
    profile = one_second_profile(tp_speedup=1.7)
    samples = ttfts(0.85, pool="1xP:tp2pp1", profile=profile)
    assert_mean(samples, speedup_mean_ttft_s(0.85, 1.0, tp_speedup=1.7))


def test_share_of_md1_within_a_limit() -> None:
    samples = ttfts(0.3917, pool="1xP:tp1pp1", profile=one_second_profile(), num_requests=50_000)
    # A TTFT of exactly two service times has probability 0: no tie.
    mean, half_width = interval([(sample <= 2.0).astype(np.float64) for sample in samples], warmup=2000)
    assert half_width < 0.01
    assert abs(mean - 0.9) < half_width


@pytest.mark.parametrize(
    "lengths",
    [Fixed(8, 401), LogNormal(prompt_mean=8.0, prompt_cv=0.1, output_mean=400.0, output_cv=0.4)],
    ids=["equal", "spread"],
)
def test_mean_time_per_token_of_continuous_batching(lengths: Lengths) -> None:
    constant_s, per_request_s, load = 4 * TICK_S, 1 * TICK_S, 0.3
    samples = []
    for seed in (1, 2, 3):
        workload = Workload(Poisson(), lengths)
        later = workload.mean_tokens(context_tokens=1 << 20).output - 1
        rate_per_s = load / (later * per_request_s)
        trace = workload.trace(rate_per_s=rate_per_s, num_requests=40_000, seed=seed, context_tokens=1 << 20)
        result = simulate(
            Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1"),
            trace,
            profiles=every_role(make_profile(decode=(4.0, 0.0, 1.0), kv_tokens=1 << 30)),
            options=Options(track_itl=False, check=True),
            phase=Role.DECODE,
        )
        samples.append(result.tpot_s)
    expected = decode_mean_step_s(
        rate_per_s, mean_output_tokens=later, constant_s=constant_s, per_request_s=per_request_s
    )
    # A newcomer waits for the end of a step: half a step in 400.
    assert_mean(samples, expected, bias=0.5 / 400 * 1.5)


# The paper's formulas


def test_figure_4_of_the_paper() -> None:
    """66B, 512 tokens, two A100: D = 0.2 s, K = 1.7; the axis is the rate per GPU."""
    d, k = 0.2, 1.7
    for per_gpu in np.linspace(0.1, 4.2, 42).tolist():
        rate = 2 * per_gpu
        inter = d + rate * d**2 / (4 * (2 - rate * d))
        intra = d / k + rate * d**2 / (2 * k * (k - rate * d))
        assert two_stage_mean_ttft_s(rate, d) == pytest.approx(inter, rel=1e-12)
        assert speedup_mean_ttft_s(rate, d, tp_speedup=k) == pytest.approx(intra, rel=1e-12)
        # Figure 4a: intra-operator parallelism is ahead up to the crossover near 3.1 requests/s per GPU, then behind.
        assert (intra < inter) == (per_gpu < parallelism_crossover_per_s(d, tp_speedup=k) / 2)
    assert parallelism_crossover_per_s(d, tp_speedup=k) / 2 == pytest.approx(3.1, abs=0.05)
    assert speedup_mean_ttft_s(0.0, d, tp_speedup=k) == pytest.approx(0.2 / 1.7)
    # Figure 4b: the larger K, the higher the rate up to which intra-operator parallelism is ahead.
    crossovers = [parallelism_crossover_per_s(d, tp_speedup=k) for k in (1.5, 1.6, 1.7, 1.8, 1.9)]
    assert crossovers == sorted(crossovers)


def test_formulas_saturate_where_the_work_fills_the_time() -> None:
    assert md1_mean_ttft_s(5.0, 0.2) == two_stage_mean_ttft_s(10.0, 0.2) == math.inf
    assert speedup_mean_ttft_s(8.5, 0.2, tp_speedup=1.7) == math.inf
    assert decode_mean_step_s(1.0, mean_output_tokens=10, constant_s=0.1, per_request_s=0.1) == math.inf
    assert md1_waiting_cdf(5.0, rate_per_s=1.0, service_s=1.0) == 0.0


def test_erlangs_distribution() -> None:
    # Below one service time it is (1 - rho) e^(R t).
    for load in (0.1, 0.5, 0.9):
        for wait in (0.0, 0.3, 0.99):
            expected = (1 - load) * math.exp(load * wait)
            assert md1_waiting_cdf(wait, rate_per_s=load, service_s=1.0) == pytest.approx(expected, rel=1e-12)
    # Its mean is Pollaczek and Khinchine's.
    for load in (0.3, 0.6):
        grid = np.arange(0.0, 10.0, 0.005)
        tail = 1 - np.array([md1_waiting_cdf(t, rate_per_s=load / 0.5, service_s=0.5) for t in grid.tolist()])
        mean = float((tail[1:] + tail[:-1]).sum()) / 2 * 0.005
        assert mean + 0.5 == pytest.approx(md1_mean_ttft_s(load / 0.5, 0.5), rel=2e-4)
    # Its series is exact however many terms cancel: the tail falls geometrically.
    tails = [1 - md1_waiting_cdf(t, rate_per_s=0.9, service_s=1.0) for t in (100.0, 110.0, 120.0)]
    assert tails[1] / tails[0] == pytest.approx(tails[2] / tails[1], rel=1e-4)


def test_goodput_of_md1() -> None:
    """TTFT within 2 D for 90 %: (1 - rho) e^rho = 0.9."""
    load = float(brentq(lambda rho: (1 - rho) * math.exp(rho) - 0.9, 0.0, 1.0, xtol=1e-14))
    assert load == pytest.approx(0.3917, abs=5e-5)
    assert md1_goodput_per_s(0.25, ttft_s=0.5, attainment=0.9) == pytest.approx(load / 0.25, rel=1e-9)
    assert md1_goodput_per_s(1.0, ttft_s=0.5, attainment=0.9) == 0.0
