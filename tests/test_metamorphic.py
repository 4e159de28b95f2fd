"""Relations between two runs that differ in one thing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.latency import AffineDecode, AffineLatency, AffinePrefill, HostOverhead, LatencyModel, ValidRange
from dsim.options import Options, Routing
from dsim.pools import Placement, Policy
from dsim.profile import Handover, Profile
from dsim.recorder import COUNT_COLUMNS, TIME_COLUMNS
from dsim.result import Result
from dsim.simulate import simulate
from dsim.slo import Slo
from dsim.trace import Trace
from tests.reference.systems import every_role, make_profile, make_trace
from tests.test_twin import Listed, System, systems


def run(system: System, *, profile: Profile | None = None, trace: Trace | None = None) -> Result:
    """Simulate a drawn case, with another profile or trace where given."""
    return simulate(
        system.placement,
        system.trace if trace is None else trace,
        profiles=every_role(profile or system.profile),
        options=system.options,
    )


# Time


HANDOVER_TIMES = [
    field.name
    for field in dataclasses.fields(Handover)
    if field.name.endswith("_s") and not field.name.endswith("bandwidth_bytes_per_s")
]


def slower(latency: LatencyModel) -> LatencyModel:
    """Return a latency model that takes twice as long."""
    if isinstance(latency, Listed):
        return Listed(slower(latency.model))
    assert isinstance(latency, AffineLatency)
    prefill = AffinePrefill(*(2 * x for x in dataclasses.astuple(latency.prefill)))
    small, large = (AffineDecode(*(2 * x for x in dataclasses.astuple(d))) for d in (latency.small, latency.large))
    return dataclasses.replace(latency, prefill=prefill, small=small, large=large)


def slowed(profile: Profile) -> Profile:
    """Return a profile in which everything takes twice as long."""
    doubled = {
        name: {role: HostOverhead(*(2 * x for x in dataclasses.astuple(host))) for role, host in hosts.items()}
        for name, hosts in (("host", profile.host), ("host_pipelined", profile.host_pipelined))
    }
    handover = profile.handover
    return dataclasses.replace(
        profile,
        latency={tp: slower(latency) for tp, latency in profile.latency.items()},
        host=doubled["host"],
        host_pipelined=doubled["host_pipelined"],
        handover=dataclasses.replace(
            handover,
            bandwidth_bytes_per_s=handover.bandwidth_bytes_per_s / 2,
            **{name: 2 * getattr(handover, name) for name in HANDOVER_TIMES},
        ),
        swap_bytes_per_s=profile.swap_bytes_per_s / 2,
        request_s=2 * profile.request_s,
    )


@given(st.booleans().flatmap(lambda dyadic: systems(dyadic=dyadic)))
def test_doubling_every_time_doubles_every_time(system: System) -> None:
    """Bit for bit: doubling is exact in binary."""
    trace = dataclasses.replace(system.trace, arrival_s=2 * system.trace.arrival_s)
    once, twice = run(system), run(system, profile=slowed(system.profile), trace=trace)
    for name in TIME_COLUMNS:
        np.testing.assert_array_equal(2 * once.columns[name], twice.columns[name], err_msg=name)
    for name in COUNT_COLUMNS:
        np.testing.assert_array_equal(once.columns[name], twice.columns[name], err_msg=name)
    assert once.events == twice.events
    assert once.utilization == twice.utilization
    for share in ("mean", "p50", "p99"):
        np.testing.assert_equal(2 * getattr(once.itl(), share), getattr(twice.itl(), share))


@given(systems(dyadic=True), st.data())
def test_the_future_does_not_change_the_past(system: System, data: st.DataObject) -> None:
    """What happens before a request is queued happens without it."""
    n = len(system.trace)
    cut = data.draw(st.integers(1, n))
    if cut == n:
        return
    columns = (getattr(system.trace, field.name)[:cut] for field in dataclasses.fields(Trace))
    whole, part = run(system), run(system, trace=Trace(*columns))
    until_s = system.trace.arrival_s[cut] + system.profile.request_s
    for name in TIME_COLUMNS:
        with_it, without = whole.columns[name][:cut], part.columns[name]
        past = (with_it < until_s) | (without < until_s)
        np.testing.assert_array_equal(with_it[past], without[past], err_msg=name)


# Requests


@given(systems(dyadic=True), st.data())
def test_requests_that_never_fit_change_nothing(system: System, data: st.DataObject) -> None:
    trace = system.trace
    places = sorted(data.draw(st.lists(st.integers(0, len(trace)), min_size=1, max_size=5)))
    arrivals = np.append(trace.arrival_s, trace.arrival_s[-1])[places]
    largest = max(system.profile.kv_capacity_tokens.values())
    more = Trace(
        np.insert(trace.arrival_s, places, arrivals),
        np.insert(trace.prompt_tokens, places, largest + 16),
        np.insert(trace.output_tokens, places, 2),
        np.insert(trace.cached_prompt_tokens, places, 0),
    )
    alone, among = run(system), run(system, trace=more)
    kept = np.ones(len(more), dtype=bool)
    kept[np.array(places) + np.arange(len(places))] = False
    assert among.columns["rejected"][~kept].all()
    for name in TIME_COLUMNS + COUNT_COLUMNS:
        np.testing.assert_array_equal(alone.columns[name], among.columns[name][kept], err_msg=name)


@pytest.mark.parametrize("placement", ["1xP:tp1pp2 + 1xD:tp1pp1", "2xP:tp1pp1 + 2xD:tp1pp1", "2xC:tp1pp1"])
@given(st.permutations(range(12)))
def test_permuting_requests_of_one_instant_permutes_their_times(placement: str, order: list[int]) -> None:
    """With steps that cost the same whatever the lengths, the order among simultaneous requests does not matter."""
    prompts = [40] * 6 + [20] * 6
    parsed = Placement.parse(placement, policy=Policy.ORCA)
    profile = every_role(make_profile(prefill=(8.0, 0.0, 0.0), decode=(4.0, 0.0, 1.0)))
    options = Options(prefill_routing=Routing.ROUND_ROBIN, decode_routing=Routing.ROUND_ROBIN)
    runs = [
        simulate(parsed, make_trace([0] * 12, [prompts[i] for i in rows], [5] * 12), profiles=profile, options=options)
        for rows in (range(12), order)
    ]
    for name in ("first_token_s", "last_token_s"):
        first, second = (sorted(result.columns[name].tolist()) for result in runs)
        assert first == second


# Memory


def unlimited(model: LatencyModel) -> LatencyModel:
    """Return the model without an end to what it was measured with."""
    if isinstance(model, Listed):
        return Listed(unlimited(model.model))
    assert isinstance(model, AffineLatency)
    return dataclasses.replace(model, valid_range=ValidRange())


@given(systems(dyadic=True), st.sampled_from([2, 16]))
def test_memory_that_is_never_short_can_be_larger(system: System, factor: int) -> None:
    models = {tp: unlimited(model) for tp, model in system.profile.latency.items()}
    ample = dataclasses.replace(
        system.profile,
        latency=models,
        kv_capacity_tokens=dict.fromkeys(system.profile.kv_capacity_tokens, 1 << 16),
        handover=dataclasses.replace(system.profile.handover, watermark=1.0),
    )
    larger = dataclasses.replace(ample, kv_capacity_tokens=dict.fromkeys(ample.kv_capacity_tokens, factor << 16))
    small, large = run(system, profile=ample), run(system, profile=larger)
    for name in TIME_COLUMNS + COUNT_COLUMNS:
        np.testing.assert_array_equal(small.columns[name], large.columns[name], err_msg=name)
    for role, peak in small.kv_peak.items():
        assert large.kv_peak[role] * factor == pytest.approx(peak)


# Targets


@given(
    systems(dyadic=False),
    st.tuples(st.floats(0.001, 2.0), st.floats(0.001, 0.5), st.floats(0.01, 5.0)),
    st.tuples(st.floats(1.0, 3.0), st.floats(1.0, 3.0), st.floats(1.0, 3.0)),
)
def test_attainment_never_falls_when_a_target_is_relaxed(
    system: System, limits: tuple[float, float, float], factors: tuple[float, float, float]
) -> None:
    result = run(system)
    tight = Slo(ttft_s=limits[0], tpot_s=limits[1], e2e_s=limits[2])
    relaxed = Slo(*(limit * factor for limit, factor in zip(limits, factors, strict=True)))
    before, after = result.attainment(tight), result.attainment(relaxed)
    assert before.both <= min(before.ttft, before.tpot)
    for name in ("both", "ttft", "tpot"):
        assert getattr(before, name) <= getattr(after, name)
    assert np.all(result.met(tight) <= result.met(relaxed))
