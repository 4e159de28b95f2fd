"""The fast simulator equals the slow reference twin: same batches, same times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsim.latency import AffineLatency, Chunk, HostOverhead, LatencyModel, ValidRange
from dsim.options import Options, Routing
from dsim.pools import Parallelism, Placement, Policy, Role
from dsim.profile import BatchLimits, FirstToken, Handover, HandoverMode, Preemption, Profile
from dsim.recorder import TIME_COLUMNS
from dsim.simulate import simulate
from dsim.trace import Trace
from dsim.workload import ClosedLoop, Uniform
from tests.reference.simulator import run_reference, run_reference_closed
from tests.reference.systems import every_role, make_profile, make_trace, tokens_per_s


@dataclass(frozen=True)
class Listed:
    """A latency model without a closed form, as a table is: it lists its decode steps."""

    model: LatencyModel

    @property
    def valid_range(self) -> ValidRange:
        return self.model.valid_range

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        return self.model.prefill_s(chunks)

    def decode_s(self, requests: int, context_tokens: int) -> float:
        return self.model.decode_s(requests, context_tokens)

    def mixed_s(self, chunks: Sequence[Chunk], requests: int, context_tokens: int) -> float:
        return self.model.mixed_s(chunks, requests, context_tokens)

    def decode_line(self, requests: int) -> None:
        return None

    def decode_run_s(self, requests: int, context_tokens: int, steps: int) -> NDArray[np.float64]:
        return self.model.decode_run_s(requests, context_tokens, steps)


@dataclass(frozen=True)
class System:
    """One drawn case.

    Args:
        profile: of every role, but for the prefill side's connector.
        prefill_step_s: what that one adds to a launch.
    """

    placement: Placement
    profile: Profile
    trace: Trace
    options: Options
    prefill_step_s: float = 0.0

    @property
    def profiles(self) -> dict[Role, Profile]:
        """The profile of each role."""
        own = Handover(step_s=self.prefill_step_s)
        return {**every_role(self.profile), Role.PREFILL: replace(self.profile, handover=own)}


@st.composite
def traces(draw: st.DrawFn, *, dyadic: bool, longest: int) -> Trace:
    """Draw up to forty requests, often at the same instant."""
    n = draw(st.integers(1, 40))
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 3, 10, 40, 150]), min_size=n, max_size=n))
    prompts = draw(st.lists(st.integers(1, longest), min_size=n, max_size=n))
    outputs = draw(st.lists(st.sampled_from([1, 1, 2, 3, 5, 17, 33, 60]), min_size=n, max_size=n))
    hits = draw(st.lists(st.integers(0, 40), min_size=n, max_size=n))
    arrivals = np.cumsum(gaps).astype(float)
    if not dyadic:
        seed = draw(st.integers(0, 1000))
        arrivals = np.sort(arrivals + np.random.default_rng(seed).random(n))
    cached = [min(h, p - 1) for h, p in zip(hits, prompts, strict=True)]
    return make_trace(arrivals.tolist(), prompts, outputs, cached)


def _host(draw: st.DrawFn, scale: float) -> HostOverhead:
    ticks = [draw(st.sampled_from([0.0, 1.0, 2.0])) * scale / 1024 for _ in range(4)]
    return HostOverhead(step_s=ticks[0], sequence_s=ticks[1] / 8, token_s=ticks[2] / 64, mixed_s=ticks[3])


def affine(profile: Profile) -> Iterator[tuple[int, AffineLatency]]:
    """Yield the latency models of a made-up profile by degree."""
    for tp, model in profile.latency.items():
        assert isinstance(model, AffineLatency)
        yield tp, model


@st.composite
def handovers(draw: st.DrawFn, *, dyadic: bool, mode: HandoverMode | None = None) -> Handover:
    """Draw a handover, of any mode if none is given."""
    mode = mode or draw(st.sampled_from(HandoverMode))

    def ticks(choices: list[float], factor: float) -> float:
        # Times without a common measure: rounding may not decide what comes first.
        return draw(st.sampled_from(choices)) * (1.0 if dyadic else factor) / 1024

    return Handover(
        first_token_from=draw(st.sampled_from(FirstToken)),
        mode=mode,
        stalls_decode=mode is HandoverMode.DIRECT and draw(st.booleans()),
        latency_s=ticks([0.0, 2.0, 9.0], 1.0371),
        bandwidth_bytes_per_s=tokens_per_s(draw(st.sampled_from([2.0**8, 2.0**12, float("inf")]))),
        watermark=draw(st.sampled_from([0.05, 0.25, 1.0])),
        hop_s=0.0 if mode is HandoverMode.LAYER_WISE else ticks([0.0, 0.0, 1.0, 3.0], 1.0173),
        post_s=ticks([0.0, 0.0, 1.0, 7.0], 1.0291),
        post_block_s=ticks([0.0, 0.0, 0.5], 1.0449),
        step_s=ticks([0.0, 0.0, 0.5], 1.0657),
    )


@st.composite
def systems(draw: st.DrawFn, *, dyadic: bool, mode: HandoverMode | None = None) -> System:
    """Draw a placement, a profile under memory pressure, and a workload; with a mode only placements that use it."""
    scale = 1.0 if dyadic else 1.0371
    colocated = mode is None and draw(st.booleans())
    longest = draw(st.sampled_from([20, 70]))
    kv_tokens = draw(st.sampled_from([96, 128, 200, 400, 1 << 16]))
    handover = draw(handovers(dyadic=dyadic, mode=mode))
    limit = st.sampled_from([1, 2, 4, 64])
    limits = {
        Role.PREFILL: BatchLimits(draw(st.sampled_from([16, 64, 4096])), draw(limit)),
        Role.DECODE: BatchLimits(requests=draw(limit)),
        Role.COLOCATED: BatchLimits(draw(st.sampled_from([16, 64, 4096])), draw(limit)),
    }
    profile = make_profile(
        prefill=(8 * scale, 0.5, draw(st.sampled_from([0.0, 1 / 64]))),
        decode=(4 * scale, draw(st.sampled_from([0.0, 1 / 32])), draw(st.sampled_from([0.0, 0.5]))),
        decode_large=(2 * scale, 1 / 32, 1.0),
        threshold_requests=3,
        host={role: _host(draw, scale) for role in Role},
        host_pipelined={Role.DECODE: _host(draw, scale)} if draw(st.booleans()) else {},
        limits=limits,
        kv_tokens=kv_tokens,
        preemption=draw(st.sampled_from(Preemption)),
        swap_tokens_per_s=draw(st.sampled_from([2.0**10, float("inf")])),
        handover=handover,
        admission_watermark=draw(st.sampled_from([0.0, 0.1])),
        request_s=draw(st.sampled_from([0.0, 4 / 1024])),
    )
    measured = ValidRange(context_tokens=draw(st.sampled_from([math.inf, math.inf, 150, 333])))
    profile = replace(profile, latency={tp: replace(model, valid_range=measured) for tp, model in affine(profile)})
    if draw(st.integers(0, 3)) == 0:
        profile = replace(profile, latency={tp: Listed(model) for tp, model in profile.latency.items()})
    degree = st.builds(Parallelism, tp=st.sampled_from([1, 2]), pp=st.sampled_from([1, 1, 2, 4]))
    count = st.integers(1, 3)
    if colocated:
        policy = draw(st.sampled_from(Policy))
        placement = Placement.colocated(
            parallelism=draw(degree),
            count=draw(count),
            policy=policy,
            token_budget=draw(st.sampled_from([2, 16, 64])) if policy is Policy.CHUNKED else None,
        )
    else:
        placement = Placement.disaggregated(
            prefill=draw(degree), num_prefill=draw(count), decode=draw(degree), num_decode=draw(count)
        )
    options = Options(
        seed=draw(st.integers(0, 5)),
        prefill_routing=draw(st.sampled_from(Routing)),
        decode_routing=draw(st.sampled_from(Routing)),
        prefill_token_limit=draw(st.sampled_from([None, 32])),
        check=True,
    )
    trace = draw(traces(dyadic=dyadic, longest=longest))
    return System(placement, profile, trace, options, draw(st.sampled_from([0.0, 1.0])) * scale / 1024)


def assert_equal_to_reference(system: System, *, tolerance_s: float) -> None:
    """Run both simulators, the fast one with and without a step log, and compare everything."""
    profiles = system.profiles
    options = system.options
    reference = run_reference(
        system.placement,
        system.trace,
        profiles,
        seed=options.seed,
        prefill_router=options.prefill_routing.value,
        decode_router=options.decode_routing.value,
        colocated_router=options.prefill_routing.value,
        prefill_token_limit=options.prefill_token_limit_at(system.placement.pools[0].parallelism.tp),
    )
    for log_steps in (False, True):
        choices = Options(
            seed=options.seed,
            prefill_routing=options.prefill_routing,
            decode_routing=options.decode_routing,
            prefill_token_limit=options.prefill_token_limit,
            check=options.check,
            log_steps=log_steps,
        )
        fast = simulate(system.placement, system.trace, profiles=profiles, options=choices)
        for name in TIME_COLUMNS:
            np.testing.assert_allclose(
                fast.columns[name], getattr(reference, name), rtol=0, atol=tolerance_s, err_msg=name, equal_nan=True
            )
        for name in ("prefill_instance", "decode_instance", "preemptions", "rejected"):
            np.testing.assert_array_equal(fast.columns[name], getattr(reference, name), err_msg=name)
        gaps = np.concatenate([np.diff(times) for times in reference.token_times] or [np.array([])])
        itl = fast.itl()
        if len(gaps):
            assert itl.mean == pytest.approx(gaps.mean(), abs=10 * tolerance_s + 1e-12)
            for share, value in ((0.5, itl.p50), (0.9, itl.p90), (0.99, itl.p99)):
                assert value == pytest.approx(np.quantile(gaps, share), abs=10 * tolerance_s + 1e-12)
        if fast.steps is not None:
            ours = [(s.role, s.instance, s.part, s.launch_s, s.end_s, s.prefill, s.decode) for s in fast.steps]
            theirs = [
                (s.role, s.instance, s.index, s.launch_s, s.end_s, s.prefill_ids, s.decode_ids) for s in reference.steps
            ]
            assert _batches(ours) == _batches(theirs)
            spans, expected = (np.array(sorted(step[3:5] for step in steps)) for steps in (ours, theirs))
            np.testing.assert_allclose(spans, expected, rtol=0, atol=tolerance_s)


def _batches(steps: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], list[tuple[Any, ...]]]:
    """Return the batches of every engine loop in order of launch."""
    batches: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for role, instance, part, _, _, prefill, decode in steps:
        batches.setdefault((role, instance, part), []).append((prefill, tuple(sorted(decode))))
    return batches


@given(systems(dyadic=True), st.integers(1, 6), st.sampled_from([0.0, 5 / 1024]), st.integers(0, 3))
def test_closed_loop_equals_the_reference(system: System, users: int, stagger_s: float, seed: int) -> None:
    compare_closed_loops(system, users, stagger_s, seed)


def compare_closed_loops(system: System, users: int, stagger_s: float, seed: int) -> None:
    """Play a closed loop through both simulators and compare every time."""
    loop = ClosedLoop(users, Uniform(30, 20, low=0.05), num_requests=users + 20, stagger_s=stagger_s)
    options = replace(system.options, seed=seed)
    streams = [loop.user_lengths(user, seed=seed, context_tokens=2048) for user in range(users)]
    lengths = [[next(stream) for _ in range(loop.num_requests)] for stream in streams]
    reference = run_reference_closed(
        system.placement,
        lengths,
        [loop.start_s(user) for user in range(users)],
        loop.num_requests,
        system.profiles,
        seed=seed,
        prefill_router=options.prefill_routing.value,
        decode_router=options.decode_routing.value,
        colocated_router=options.prefill_routing.value,
        prefill_token_limit=options.prefill_token_limit_at(system.placement.pools[0].parallelism.tp),
    )
    fast = simulate(system.placement, loop, profiles=system.profiles, options=options)
    for name in TIME_COLUMNS:
        np.testing.assert_array_equal(fast.columns[name], getattr(reference, name), err_msg=name)


@pytest.mark.parametrize("users", [2, 3, 5])
@pytest.mark.parametrize(("request_s", "stagger_s"), [(0.0, 0.0), (0.0, 5 / 1024), (4 / 1024, 5 / 1024)])
@pytest.mark.parametrize("seed", range(4))
def test_users_whose_requests_are_rejected_at_once_take_turns(
    users: int, request_s: float, stagger_s: float, seed: int
) -> None:
    policy = Policy.ORCA
    placement = Placement.colocated(parallelism=Parallelism(1, 4), count=1, policy=policy)
    # A block for each engine loop: most requests are too long for it.
    profile = make_profile(kv_tokens=96, request_s=request_s)
    nothing = make_trace([0.0], [1], [1], [0])
    system = System(placement, profile, nothing, Options(check=True))
    compare_closed_loops(system, users, stagger_s, seed)


@given(systems(dyadic=True))
def test_equals_the_reference_bit_for_bit_with_dyadic_times(system: System) -> None:
    assert_equal_to_reference(system, tolerance_s=0.0)


@given(systems(dyadic=False))
def test_equals_the_reference_within_a_nanosecond(system: System) -> None:
    assert_equal_to_reference(system, tolerance_s=1e-9)


@pytest.mark.parametrize("mode", HandoverMode)
@settings(max_examples=35)
@given(data=st.data())
def test_every_handover_equals_the_reference(mode: HandoverMode, data: st.DataObject) -> None:
    assert_equal_to_reference(data.draw(systems(dyadic=True, mode=mode)), tolerance_s=0.0)


def at_once(mode: HandoverMode, placement: str, *, post_s: float, latency_s: float = 0.0) -> System:
    """Return a system in which many things happen at the same instants: every step takes 4 ticks."""
    profile = make_profile(
        prefill=(4.0, 0.0, 0.0),
        decode=(4.0, 0.0, 0.0),
        limits={Role.PREFILL: BatchLimits(requests=1)},
        handover=Handover(mode=mode, stalls_decode=False, watermark=1.0, post_s=post_s, latency_s=latency_s),
    )
    trace = make_trace([4.0 * i for i in range(24)], [16] * 24, [7 + i % 5 for i in range(24)])
    return System(Placement.parse(placement), profile, trace, Options(check=True))


@pytest.mark.parametrize("mode", HandoverMode)
@pytest.mark.parametrize("placement", ["1xP:tp1pp1 + 2xD:tp1pp1", "2xP:tp1pp2 + 1xD:tp1pp1", "1xP:tp1pp1 + 2xD:tp1pp2"])
def test_handovers_at_the_instants_of_steps(mode: HandoverMode, placement: str) -> None:
    """A step that ends as a prefill is launched has its follower launched before a layer-wise pull is posted."""
    assert_equal_to_reference(at_once(mode, placement, post_s=1 / 1024, latency_s=2 / 1024), tolerance_s=0.0)
    assert_equal_to_reference(at_once(mode, placement, post_s=4 / 1024), tolerance_s=0.0)


@pytest.mark.parametrize(("mode", "stalls"), [(HandoverMode.DIRECT, True), (HandoverMode.PULL_AT_STEP, False)])
def test_pulls_of_one_instant_are_in_order_of_instance(mode: HandoverMode, stalls: bool) -> None:
    """Instance 0, in the middle of a request, is between two steps as both are handed a prompt: it pulls first."""
    profile = make_profile(
        prefill=(4.0, 0.0, 0.0),
        decode=(4.0, 0.0, 0.0),
        handover=Handover(mode=mode, stalls_decode=stalls, watermark=1.0, latency_s=4 / 1024),
    )
    trace = make_trace([0.0, 0.0, 8.0, 8.0], [16] * 4, [9, 2, 2, 2])
    options = Options(check=True, decode_routing=Routing.ROUND_ROBIN)
    system = System(Placement.parse("1xP:tp1pp1 + 2xD:tp1pp1"), profile, trace, options)
    result = simulate(system.placement, trace, profiles=profile, options=options)
    assert (1024 * result.columns["transfer_start_s"]).tolist() == [4, 8, 12, 16]
    assert_equal_to_reference(system, tolerance_s=0.0)
