"""Analytic bounds are never below what any simulation does."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.latency import AffineLatency, HostOverhead, LatencyModel
from dsim.options import Options, Routing
from dsim.pools import Placement, Policy, Role
from dsim.profile import BatchLimits, FirstToken, Handover, HandoverMode, PointToPoint, Preemption, Profile
from dsim.result import Result
from dsim.simulate import simulate
from dsim.slo import Slo
from dsim.trace import Trace
from dsim.workload import Fixed, Lengths, Poisson, Workload
from placement import bounds
from placement.probe import Probe, Scenario, run_probe
from placement.queueing import decode_mean_step_s, md1_goodput_per_s
from placement.search import candidates, case, scenario
from placement.work import prefill_queue
from tests import bound_cases
from tests.reference.systems import every_role, make_profile, tokens_per_s
from tests.tiny import tiny_question

PLACEMENTS = (
    "1xP:tp1pp1 + 1xD:tp1pp1",
    "2xP:tp1pp1 + 1xD:tp2pp1",
    "1xP:tp2pp2 + 2xD:tp1pp1",
    "1xP:tp1pp1 + 1xD:tp1pp2",
    "1xP:tp2pp1 + 1xD:tp1pp4",
    "1xC:tp1pp1",
    "2xC:tp2pp1",
    "1xC:tp1pp2",
)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    number = st.floats(0.1, 8.0)
    small = (draw(number), draw(st.floats(0.0, 0.05)), draw(st.floats(0.0, 1.0)))
    large = (draw(number), draw(st.floats(0.0, 0.05)), draw(st.floats(0.0, 1.0)))
    cost = st.floats(0.0, 0.002)
    host = {role: HostOverhead(draw(cost), draw(cost) / 10, draw(cost) / 1000) for role in Role}
    mode = draw(st.sampled_from(HandoverMode))
    handover = Handover(
        first_token_from=draw(st.sampled_from(FirstToken)),
        mode=mode,
        stalls_decode=mode is HandoverMode.DIRECT and draw(st.booleans()),
        hop_s=0.0 if mode is HandoverMode.LAYER_WISE else draw(cost),
        post_s=draw(cost),
        post_block_s=draw(cost) / 10,
        step_s=draw(cost) / 2,
        latency_s=draw(cost),
        bandwidth_bytes_per_s=tokens_per_s(draw(st.floats(5e3, 1e6))),
        watermark=draw(st.sampled_from([0.05, 0.5])),
    )
    made = make_profile(
        prefill=(draw(number), draw(st.floats(0.01, 0.5)), draw(st.floats(0.0, 0.001))),
        decode=small,
        decode_large=large,
        threshold_requests=draw(st.integers(2, 12)),
        host=host,
        limits={
            Role.PREFILL: BatchLimits(
                draw(st.sampled_from([64, 512, math.inf])), draw(st.sampled_from([1, 4, math.inf]))
            ),
            Role.DECODE: BatchLimits(math.inf, draw(st.sampled_from([2, 8, math.inf]))),
            Role.COLOCATED: BatchLimits(draw(st.sampled_from([64, 512])), draw(st.sampled_from([2, 8, math.inf]))),
        },
        kv_tokens=draw(st.sampled_from([1 << 10, 1 << 12, 1 << 20])),
        preemption=draw(st.sampled_from(Preemption)),
        swap_tokens_per_s=draw(st.floats(1e4, 1e6)),
        handover=handover,
        request_s=draw(cost),
    )
    latency = {tp: draw(bent(model)) for tp, model in made.latency.items()}
    return dataclasses.replace(made, latency=latency, p2p=PointToPoint(draw(cost), draw(st.sampled_from([1e5, 1e9]))))


@st.composite
def bent(draw: st.DrawFn, latency: LatencyModel) -> LatencyModel:
    """The latency model, or one whose lines bend up and down in tokens and requests."""
    assert isinstance(latency, AffineLatency)
    if draw(st.booleans()):
        return latency
    share = st.floats(0.0, 4.0)
    p, small, large = latency.prefill, latency.small, latency.large
    tokens = draw(st.lists(st.integers(1, 600), max_size=3, unique=True).map(sorted))
    requests = draw(st.lists(st.integers(1, 12), max_size=2, unique=True).map(sorted))
    return dataclasses.replace(
        latency,
        prefill=dataclasses.replace(
            p,
            per_request_s=draw(share) * p.constant_s / 8,
            bends=tuple((t, draw(share) * p.per_token_s) for t in tokens),
        ),
        small=dataclasses.replace(small, bends=tuple((n, draw(share) * small.per_request_s) for n in requests)),
        large=dataclasses.replace(large, bends=tuple((n, draw(share) * large.per_request_s) for n in requests)),
    )


def run(
    text: str, profile: Profile, policy: Policy, *, gap_s: float, seed: int, options: Options | None = None
) -> tuple[Placement, Result]:
    placement = Placement.parse(text, policy=policy, token_budget=64)
    rng = np.random.default_rng(seed)
    n = 150
    prompts = rng.integers(1, 200, n)
    trace = Trace(
        np.cumsum(rng.standard_exponential(n)) * gap_s,
        prompts,
        rng.integers(1, 100, n),
        np.minimum(rng.integers(0, 50, n) * rng.integers(0, 2, n), prompts - 1),
    )
    return placement, simulate(placement, trace, profiles=profile, options=options or Options(track_itl=False))


def rate_of(result: Result) -> float:
    """Requests over the time from the first arrival to the last token."""
    return len(result) / float(result.columns["last_token_s"].max() - result.columns["arrival_s"][0])


def case_of(result: Result, profile: Profile, slo: Slo | None = None, target: float = 0.9) -> bounds.Case:
    """What the bounds know of exactly the requests of a run."""
    columns = result.columns
    trace = Trace(
        columns["arrival_s"], columns["prompt_tokens"], columns["output_tokens"], columns["cached_prompt_tokens"]
    )
    options = Options(prefill_routing=Routing.ROUND_ROBIN)
    return bounds.Case(every_role(profile), bounds.Sample.of(trace), slo or Slo(), target, options, margin=0.0)


@settings(max_examples=40)
@given(profiles(), st.sampled_from(PLACEMENTS), st.sampled_from(Policy), st.integers(0, 1000))
def test_no_run_finishes_sooner_than_its_work_allows(profile: Profile, text: str, policy: Policy, seed: int) -> None:
    """On the very lengths of a run the capacity bounds hold exactly, so no tolerance hides a wrong one."""
    placement, result = run(text, profile, policy, gap_s=1e-3, seed=seed)
    assert not result.columns["rejected"].any()
    least = bounds.upper_bounds(placement, case_of(result, profile))[0]
    assert rate_of(result) <= least.rate_per_s * (1 + 1e-9), least.name


@settings(max_examples=60)
@given(
    profiles(),
    st.sampled_from(PLACEMENTS),
    st.sampled_from(Policy),
    st.integers(0, 1000),
    st.floats(1e-3, 0.3),
    st.sampled_from([0.5, 0.8, 0.95]),
    st.sampled_from(["tpot_s", "e2e_s"]),
)
def test_no_run_within_limits_finishes_sooner(
    profile: Profile, text: str, policy: Policy, seed: int, gap_s: float, target: float, limited: str
) -> None:
    """The limit is the one that this share of a run's requests just met: on them the bounds hold exactly again."""
    placement, result = run(text, profile, policy, gap_s=gap_s, seed=seed)
    values = result.tpot_s if limited == "tpot_s" else result.e2e_s
    limit_s = float(np.quantile(np.where(np.isnan(values), 0.0, values), target, method="higher"))
    slo = Slo(**{limited: max(limit_s, 1e-9)})
    assert result.met(slo).mean() >= target
    for bound in bounds.upper_bounds(placement, case_of(result, profile, slo, target)):
        if "waiting" not in bound.name:
            assert rate_of(result) <= bound.rate_per_s * (1 + 1e-9), bound.name


@settings(max_examples=40)
@given(
    profiles(),
    st.sampled_from([text for text in PLACEMENTS if "P" in text] + ["3xP:tp1pp2 + 1xD:tp1pp1"]),
    st.integers(0, 1000),
    st.floats(1e-3, 3.0),
)
def test_no_request_waits_less_than_its_queue_allows(profile: Profile, text: str, seed: int, gap_s: float) -> None:
    """On the very arrivals of a run no request has its first token, or its last, before the queue lets it."""
    options = Options(track_itl=False, prefill_routing=Routing.ROUND_ROBIN)
    placement, result = run(text, profile, Policy.ORCA, gap_s=gap_s, seed=seed, options=options)
    case = case_of(result, profile)
    prefill_s = prefill_queue(placement.pools[0], case).least_s(case.sample.rate_per_s)
    arrival_s, end_s = result.columns["arrival_s"], result.columns["prefill_end_s"]
    assert np.all(end_s - arrival_s - profile.request_s >= prefill_s - 1e-9)
    ttft_s, _, e2e_s = bounds.alone_s(placement, case, prefill_s)
    assert np.all(result.ttft_s >= ttft_s - 1e-9)
    assert np.all(result.e2e_s >= e2e_s - 1e-9)


@settings(max_examples=40)
@given(profiles(), st.sampled_from(PLACEMENTS), st.sampled_from(Policy), st.integers(0, 1000), st.floats(1e-3, 3.0))
def test_no_request_is_faster_than_alone(profile: Profile, text: str, policy: Policy, seed: int, gap_s: float) -> None:
    placement, result = run(text, profile, policy, gap_s=gap_s, seed=seed)
    ttft_s, tpot_s, e2e_s = bounds.alone_s(placement, case_of(result, profile))
    slack = 1 - 1e-9
    assert np.all(result.ttft_s >= ttft_s * slack)
    assert np.all(result.e2e_s >= e2e_s * slack)
    several = result.columns["output_tokens"] > 1
    assert np.all(result.tpot_s[several] >= tpot_s[several] * slack - 1e-12)


def test_alone_is_exact_for_single_requests() -> None:
    """With requests far apart the limits are reached, so the idle share is no loose bound."""
    profile = make_profile(decode=(4.0, 0.01, 1.0), request_s=0.01)
    placement, result = run("1xP:tp1pp2 + 1xD:tp2pp1", profile, Policy.ORCA, gap_s=1e3, seed=1)
    ttft_s, tpot_s, e2e_s = bounds.alone_s(placement, case_of(result, profile))
    assert result.ttft_s == pytest.approx(ttft_s)
    assert result.e2e_s == pytest.approx(e2e_s)
    several = result.columns["output_tokens"] > 1
    assert result.tpot_s[several] == pytest.approx(tpot_s[several])


@pytest.mark.parametrize("shown", FirstToken)
@pytest.mark.parametrize("mode", HandoverMode)
def test_alone_is_exact_in_every_mode(mode: HandoverMode, shown: FirstToken) -> None:
    """The second hop and the connector's steps are counted; slow transfers outlast the prefill, fast ones do not."""
    for tokens in (500.0, 1e5):
        handover = Handover(
            first_token_from=shown,
            mode=mode,
            stalls_decode=False,
            latency_s=0.002,
            bandwidth_bytes_per_s=tokens_per_s(tokens),
            hop_s=0.0 if mode is HandoverMode.LAYER_WISE else 0.003,
            step_s=0.001,
        )
        profile = make_profile(decode=(4.0, 0.01, 1.0), request_s=0.01, handover=handover)
        placement, result = run("1xP:tp1pp2 + 1xD:tp2pp1", profile, Policy.ORCA, gap_s=1e3, seed=1)
        ttft_s, tpot_s, e2e_s = bounds.alone_s(placement, case_of(result, profile))
        assert result.ttft_s == pytest.approx(ttft_s)
        assert result.e2e_s == pytest.approx(e2e_s)
        several = result.columns["output_tokens"] > 1
        exact = result.tpot_s[several] == pytest.approx(tpot_s[several])
        # A prefill in company is longer and hides more of a slow layer-wise transfer.
        assert exact == (mode is not HandoverMode.LAYER_WISE or shown is not FirstToken.PREFILL or tokens > 1e4)


def test_posting_pulls_takes_of_the_decode_driver() -> None:
    handover = Handover(mode=HandoverMode.PULL_AT_STEP, stalls_decode=False, post_s=0.05, post_block_s=0.01)
    profile = make_profile(decode=(0.001, 0.0, 0.0), handover=handover)
    trace = Trace(np.arange(9.0), np.full(9, 120), np.full(9, 2), np.zeros(9, dtype=np.int64))
    case = bounds.Case(every_role(profile), bounds.Sample.of(trace), Slo(), 0.9)
    for decode in ("tp1pp1", "tp1pp2"):
        found = {b.name: b for b in bounds.upper_bounds(Placement.parse(f"1xP:tp1pp1 + 1xD:{decode}"), case)}
        # 120 tokens are 8 blocks: 0.13 s of the driver.
        assert found["decode capacity"].rate_per_s == pytest.approx(1 / 0.13, rel=1e-3)
    quiet = make_profile(handover=dataclasses.replace(handover, first_token_from=FirstToken.TRANSFER_END))
    single = Trace(np.arange(9.0), np.full(9, 120), np.ones(9, dtype=np.int64), np.zeros(9, dtype=np.int64))
    case = bounds.Case(every_role(quiet), bounds.Sample.of(single), Slo(), 0.9)
    # Nothing is launched, so nothing is paid for.
    found = {b.name: b for b in bounds.upper_bounds(Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1"), case)}
    assert math.isinf(found["decode capacity"].rate_per_s)


def test_chunks_alone() -> None:
    profile = make_profile(decode=(4.0, 0.01, 1.0), prefill=(8.0, 1.0, 0.01))
    placement, result = run("1xC:tp1pp1", profile, Policy.CHUNKED, gap_s=1e3, seed=1)
    ttft_s, _, e2e_s = bounds.alone_s(placement, case_of(result, profile))
    assert result.ttft_s == pytest.approx(ttft_s)
    assert result.e2e_s == pytest.approx(e2e_s)


def test_too_few_requests_meet_the_limits_alone() -> None:
    profile = make_profile()
    placement, result = run("1xC:tp1pp1", profile, Policy.ORCA, gap_s=1e3, seed=1)
    median_s = float(np.median(result.ttft_s))
    case = dataclasses.replace(case_of(result, profile, Slo(ttft_s=median_s)), margin=4.0)
    assert bounds.idle_attainment(placement, case) == pytest.approx(0.5, abs=0.02)
    least = bounds.upper_bounds(placement, case)[0]
    assert least.rate_per_s == 0.0
    assert least.name.startswith("alone on an idle system 5")
    assert bounds.upper_bounds(placement, case_of(result, profile, Slo(ttft_s=10 * median_s)))[0].rate_per_s > 0


def test_prefill_capacity_is_that_of_a_server() -> None:
    """One prompt a batch: the capacity of M/D/1."""
    profile = make_profile(prefill=(8.0, 1.0, 0.0), limits={Role.PREFILL: BatchLimits(requests=1)})
    trace = Trace(np.arange(9.0), np.full(9, 120), np.ones(9, dtype=np.int64), np.zeros(9, dtype=np.int64))
    case = bounds.Case(every_role(profile), bounds.Sample.of(trace), Slo(), 0.9)
    found = bounds.upper_bounds(Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1"), case)
    assert found[0].name == "prefill capacity"
    assert found[0].rate_per_s == pytest.approx(8.0)
    twice = bounds.upper_bounds(Placement.parse("2xP:tp1pp1 + 1xD:tp1pp1"), case)
    assert twice[0].rate_per_s == pytest.approx(16.0)


def sampled(profile: Profile, lengths: Lengths, slo: Slo, target: float = 0.9) -> bounds.Case:
    """What the bounds of a search know: a sample of Poisson arrivals."""
    trace = Workload(Poisson(), lengths).trace(num_requests=1 << 15, seed=3, context_tokens=1 << 20, rate_per_s=1.0)
    return bounds.Case(every_role(profile), bounds.Sample.of(trace), slo, target)


@pytest.mark.parametrize("limit", [1.5, 2.0, 4.0])
def test_waiting_for_one_instance_is_that_of_md1(limit: float) -> None:
    """Above Erlang's goodput, by what the error of the sample costs."""
    profile = make_profile(prefill=(8.0, 1.0, 0.0), limits={Role.PREFILL: BatchLimits(requests=1)})
    service_s = 108 / 1024
    case = sampled(profile, Fixed(100, 1), Slo(ttft_s=limit * service_s))
    found = bounds.upper_bounds(Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1"), case)[0]
    assert found.name == "waiting for prefill"
    exact = md1_goodput_per_s(service_s, ttft_s=limit * service_s, attainment=0.9)
    assert exact <= found.rate_per_s <= 1.05 * exact
    # Of two instances nothing is known but what they can do, unless they take turns.
    assert bounds.waiting_bound(Placement.parse("2xP:tp1pp1 + 1xD:tp1pp1"), case).rate_per_s == math.inf
    turns = dataclasses.replace(case, options=Options(prefill_routing=Routing.ROUND_ROBIN), waits={})
    both = bounds.waiting_bound(Placement.parse("2xP:tp1pp1 + 1xD:tp1pp1"), turns).rate_per_s
    assert 2 * exact < both < 2 / service_s


@pytest.mark.parametrize("limit", [20.0, 40.0, 80.0])
@pytest.mark.parametrize("kind", ["1xD:tp1pp1", "1xD:tp1pp2", "1xC:tp1pp1"])
def test_decoding_within_a_limit_is_that_of_the_batch_that_just_meets_it(limit: float, kind: str) -> None:
    """Steps of 8 + B / 5 ticks: at most 5 (limit - 8) requests may share one, and so their number bounds the rate."""
    profile = make_profile(prefill=(0.0, 1.0, 0.0), decode=(8.0, 0.0, 0.2))
    case = sampled(profile, Fixed(10, 201), Slo(tpot_s=limit / 1024), target=0.999)
    found = bounds.upper_bounds(Placement.parse(kind if "C" in kind else f"9xP:tp1pp1 + {kind}"), case)[0]
    assert found.name.endswith("within its limits")
    most = 5 * (limit - 8)
    request_s = 200 * limit / most / 1024 / (2 if "pp2" in kind else 1) + (10 / 1024 if "C" in kind else 0.0)
    assert 1 / request_s <= found.rate_per_s <= 1.01 / request_s
    if kind == "1xD:tp1pp1":
        # Of requests that need not meet it a tenth saves little.
        exact = (limit - 8.2) / (limit * 200 * 0.2 / 1024)
        assert decode_mean_step_s(exact, mean_output_tokens=200, constant_s=8 / 1024, per_request_s=0.2 / 1024) == (
            pytest.approx(limit / 1024)
        )
        tenth = dataclasses.replace(case, target=0.9, known={})
        looser = bounds.upper_bounds(Placement.parse("9xP:tp1pp1 + 1xD:tp1pp1"), tenth)[0]
        assert found.rate_per_s < looser.rate_per_s < 1.07 * exact


def test_memory_and_limit_together() -> None:
    """The cache holds 40 requests, the limit allows 60: the cache decides, as if there were no limit."""
    profile = make_profile(prefill=(0.0, 1.0, 0.0), decode=(8.0, 0.0, 0.2), kv_tokens=40 * 112)
    slo = Slo(tpot_s=20 / 1024)
    case = sampled(profile, Fixed(11, 202), slo)
    found = {b.name: b.rate_per_s for b in bounds.upper_bounds(Placement.parse("9xP:tp1pp1 + 1xD:tp1pp1"), case)}
    assert found["decode within its limits"] == pytest.approx(found["decode capacity"], rel=1e-3)
    assert found["decode capacity"] == pytest.approx(1 / (201 * 16 / 40 / 1024), rel=0.01)


def test_prompts_that_ride_on_decode_steps_cost_what_their_number_allows() -> None:
    """The first 64 tokens of a step are nearly free, but then there are many steps: the price is that of the mean."""
    profile = make_profile(prefill=(8.0, 0.01, 0.0), decode=(8.0, 0.0, 0.0))
    affine = profile.latency[1]
    assert isinstance(affine, AffineLatency)
    bent = dataclasses.replace(affine, prefill=dataclasses.replace(affine.prefill, bends=((64, 0.1 / 1024),)))
    profile = dataclasses.replace(profile, latency={1: bent}, limits={Role.COLOCATED: BatchLimits(2048, 32)})
    case = sampled(profile, Fixed(512, 33), Slo())
    found = {b.name: b.rate_per_s for b in bounds.upper_bounds(Placement.parse("1xC:tp1pp1", policy=Policy.ORCA), case)}
    # A batch of 32 finishes one request a step, so a step has 512 tokens: 8 + 0.64 + 44.8 ticks.
    assert found["colocated within its limits"] == pytest.approx(1024 / 53.44, rel=1e-3)
    # With the cheapest token's price for all of them: 8 + 5.12 ticks.
    assert found["colocated capacity"] == pytest.approx(1024 / 13.12, rel=1e-3)


@pytest.mark.parametrize("number", range(16))
def test_no_candidate_sustains_more_than_its_bound(number: int) -> None:
    """A few of the random cases of tests/bound_cases.py, with their simulations."""
    bound_cases.check(number)


def goodput_per_gpu(placement: Placement, known: bounds.Case, scenario: Scenario) -> float:
    """The rate per GPU at which one run of fair length just meets the limits, by bisection below twice the bound."""
    low, high = 0.0, 2 * bounds.upper_bounds(placement, known)[0].rate_per_s
    for _ in range(9):
        rate = (low + high) / 2
        seen = run_probe(scenario, Probe(placement, rate, 0, 200, 1000, 200)).observation
        low, high = (rate, high) if seen.stable and seen.attainment >= known.target else (low, rate)
    return low / placement.num_gpus


@pytest.mark.parametrize("slo", [Slo(ttft_s=0.3, tpot_s=0.03), Slo(ttft_s=0.15, tpot_s=0.1)], ids=str)
def test_pruning_by_bounds_finds_the_set_that_brute_force_finds(slo: Slo) -> None:
    """The best placements of a small space, up to 5 %: no bound cuts one of them off, and some cut others."""
    question = tiny_question(slo=slo, policies=(Policy.ORCA, Policy.DECODE_FIRST))
    known, runs = case(question), scenario(question)
    space = [p for p in candidates(question) if all(pool.parallelism.pp == 1 for pool in p.pools)]
    brute = {p: goodput_per_gpu(p, known, runs) for p in space}
    found: dict[Placement, float] = {}
    bound = {p: bounds.upper_bounds(p, known)[0].rate_per_s / p.num_gpus for p in space}
    for placement in sorted(space, key=lambda p: -bound[p]):
        if bound[placement] > max(found.values(), default=0.0):
            found[placement] = brute[placement]

    def best(goodputs: dict[Placement, float]) -> set[Placement]:
        return {p for p, rate in goodputs.items() if rate >= 0.95 * max(goodputs.values())}

    assert best(found) == best(brute)
    assert len(found) < len(space)
    for placement, rate in brute.items():
        assert rate <= 1.02 * bound[placement], placement.label


def test_other_latency_models_are_bounded_by_latency_only() -> None:
    class Constant:
        """A model that the capacity bounds know nothing about."""

        def __init__(self, inner: object) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

    profile = make_profile()
    odd = dataclasses.replace(profile, latency={tp: Constant(m) for tp, m in profile.latency.items()})  # type: ignore[misc]
    trace = Trace(np.arange(9.0), np.full(9, 120), np.full(9, 5), np.zeros(9, dtype=np.int64))
    case = bounds.Case(every_role(odd), bounds.Sample.of(trace), Slo(ttft_s=1.0), 0.9)
    found = bounds.upper_bounds(Placement.parse("1xC:tp1pp1"), case)
    assert math.isinf(found[0].rate_per_s)
