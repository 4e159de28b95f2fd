"""Sensitivity's wrappers are latency models and workloads like any other, only longer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.contract import ViolationKind, find_violations
from dsim.latency import HostOverhead, LatencyModel
from dsim.pools import Placement, Role
from dsim.profile import Profile
from dsim.recorder import COUNT_COLUMNS, TIME_COLUMNS
from dsim.slo import Slo
from dsim.trace import Trace
from dsim.workload import Fixed, Poisson, Workload, preset
from experiments.report.scaled import ScaledLatency, ScaledLengths, scaled_profile
from experiments.report.sensitivity import (
    CASES,
    Case,
    CasePoint,
    Changed,
    Contender,
    Sensitivity,
    Verdict,
    changed,
    sensitivity,
)
from placement.goodput import Observation
from placement.probe import Outcome, Probe, Scenario
from placement.search import Question
from placement.single import goodput_of
from placement.statistics import Interval
from profiles.shipped import find_profile
from tests.test_metamorphic import run, slower
from tests.test_twin import System, systems

PROFILE = find_profile("13b", "a100-80g", engine="distserve")
FACTORS = (0.8, 1.2, 2.0)
LENGTHS = Fixed(512, 16)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_step_takes_so_many_times_as_long(factor: float, tp: int) -> None:
    base = PROFILE.latency_at(tp)
    scaled: LatencyModel = ScaledLatency(base, factor)
    assert isinstance(scaled, LatencyModel)
    assert scaled.valid_range == base.valid_range
    chunks = [(512, 0), (100, 700)]
    assert scaled.prefill_s(chunks) == pytest.approx(factor * base.prefill_s(chunks), rel=1e-12)
    for requests in (1, 94, 95, 192):
        assert scaled.decode_s(requests, 9_000) == pytest.approx(factor * base.decode_s(requests, 9_000), rel=1e-12)
        assert scaled.mixed_s(chunks, requests, 9_000) == pytest.approx(
            factor * base.mixed_s(chunks, requests, 9_000), rel=1e-12
        )
        line = scaled.decode_line(requests)
        assert line is not None
        steps = scaled.decode_run_s(requests, 9_000, 40)
        assert steps.shape == (40,)
        for step, step_s in enumerate(steps):
            context = 9_000 + step * requests
            assert step_s == scaled.decode_s(requests, context) == line[0] + line[1] * context
    assert scaled.mixed_s([], 5, 100) == scaled.decode_s(5, 100)
    assert scaled.mixed_s(chunks, 0, 0) == scaled.prefill_s(chunks)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_contract_holds_where_it_did(tp: int) -> None:
    """A slower model breaks no rule that the measured one keeps; a faster one may only come below the datasheet."""
    base = PROFILE.latency_at(tp)

    def broken(factor: float) -> set[ViolationKind]:
        scaled = ScaledLatency(base, factor)
        return {found.kind for found in find_violations(scaled, model=PROFILE.model, gpu=PROFILE.gpu, tp=tp)}

    known = {found.kind for found in find_violations(base, model=PROFILE.model, gpu=PROFILE.gpu, tp=tp)}
    assert broken(1.2) <= known
    assert broken(0.8) <= known | {ViolationKind.BELOW_BOUND}


@given(st.booleans().flatmap(lambda dyadic: systems(dyadic=dyadic)))
def test_twice_the_step_times_are_those_of_doubled_coefficients(system: System) -> None:
    """Bit for bit: closed forms, tables and preemptions included."""
    base = system.profile
    doubled = dataclasses.replace(base, latency={tp: slower(model) for tp, model in base.latency.items()})
    scaled = dataclasses.replace(base, latency={tp: ScaledLatency(model, 2.0) for tp, model in base.latency.items()})
    mine, theirs = run(system, profile=scaled), run(system, profile=doubled)
    for name in (*TIME_COLUMNS, *COUNT_COLUMNS):
        assert np.array_equal(mine.columns[name], theirs.columns[name], equal_nan=True), name


def test_the_drivers_work_scales_and_transfers_do_not() -> None:
    every = {role: HostOverhead(1e-3 * i, 2e-4 * i, 3e-7 * i, 4e-5 * i) for i, role in enumerate(Role, start=1)}
    base = dataclasses.replace(PROFILE, host=every, host_pipelined=dict(reversed(every.items())))
    scaled = scaled_profile(base, 1.2)
    for theirs, mine in ((base.host, scaled.host), (base.host_pipelined, scaled.host_pipelined)):
        assert set(mine) == set(theirs)
        for role, host in theirs.items():
            expected = {name: 1.2 * value for name, value in dataclasses.asdict(host).items()}
            assert min(expected.values()) > 0
            assert dataclasses.asdict(mine[role]) == pytest.approx(expected, rel=1e-12)
    assert scaled.handover == PROFILE.handover
    assert scaled.swap_bytes_per_s == PROFILE.swap_bytes_per_s
    assert scaled.request_s == PROFILE.request_s


@given(
    prompt=st.sampled_from([0.8, 1.0, 1.2, 3.0]),
    output=st.sampled_from([0.8, 1.0, 1.2, 3.0]),
    seed=st.integers(0, 99),
    context=st.sampled_from([2048, 600]),
)
def test_scaled_lengths_stay_requests(prompt: float, output: float, seed: int, context: int) -> None:
    source = Workload(Poisson(), preset("sharegpt" if context == 2048 else "humaneval"))
    scaled = ScaledLengths(source, prompt=prompt, output=output)
    asked = {"num_requests": 200, "seed": seed, "context_tokens": context, "rate_per_s": 2.0}
    base, found = source.trace(**asked), scaled.trace(**asked)  # type: ignore[arg-type]
    assert np.array_equal(found.arrival_s, base.arrival_s)
    assert (found.prompt_tokens + found.output_tokens <= context).all()
    fits = np.rint(base.prompt_tokens * prompt) + np.rint(base.output_tokens * output) <= context
    assert (found.prompt_tokens[fits] == np.maximum(1, np.rint(base.prompt_tokens[fits] * prompt))).all()
    assert (found.output_tokens[fits] == np.maximum(1, np.rint(base.output_tokens[fits] * output))).all()
    if prompt > 1 and output == 1:
        assert (found.prompt_tokens >= base.prompt_tokens).all()
        assert (found.output_tokens == base.output_tokens).all()


def test_scaled_lengths_round_and_cut() -> None:
    source = Workload(Poisson(), Fixed(1000, 3))
    asked = {"num_requests": 5, "seed": 0, "rate_per_s": 1.0}
    shorter = ScaledLengths(source, output=0.8).trace(context_tokens=2048, **asked)  # type: ignore[arg-type]
    assert set(shorter.output_tokens) == {2}
    longer = ScaledLengths(source, prompt=1.2).trace(context_tokens=1100, **asked)  # type: ignore[arg-type]
    assert set(longer.prompt_tokens) == {1097}
    assert ScaledLengths(source, prompt=1.2).cut(context_tokens=1100) == 1.0
    assert ScaledLengths(source, prompt=1.2).cut(context_tokens=2048) == 0.0


class Cached:
    """Three requests, two of which find part of their prompt in the cache."""

    def trace(self, *, num_requests: int, seed: int, context_tokens: int, rate_per_s: float | None = None) -> Trace:
        """Return them, whatever is asked."""
        return Trace(np.arange(3.0), np.array([100, 100, 4]), np.array([10, 10, 10]), np.array([60, 0, 3]))


def test_what_a_prompt_finds_in_the_cache_grows_with_it() -> None:
    asked = {"num_requests": 3, "seed": 0, "context_tokens": 2048}
    longer = ScaledLengths(Cached(), prompt=1.2).trace(**asked)
    assert longer.prompt_tokens.tolist() == [120, 120, 5]
    assert longer.cached_prompt_tokens.tolist() == [72, 0, 4]
    assert longer.output_tokens.tolist() == [10, 10, 10]
    shorter = ScaledLengths(Cached(), prompt=0.8).trace(**asked)
    # Of a prompt of 3 tokens one is computed.
    assert (shorter.prompt_tokens.tolist(), shorter.cached_prompt_tokens.tolist()) == ([80, 80, 3], [48, 0, 2])
    talkative = ScaledLengths(Cached(), output=1.2).trace(**asked)
    assert (talkative.prompt_tokens.tolist(), talkative.cached_prompt_tokens.tolist()) == ([100, 100, 4], [60, 0, 3])
    assert talkative.output_tokens.tolist() == [12, 12, 12]


def test_nothing_changed_is_the_same_scenario() -> None:
    scenario = Scenario({Role.PREFILL: PROFILE}, Workload(Poisson(), Fixed(100, 10)), Slo(0.4, 0.1), 0.9)
    assert changed(scenario, Case(Changed.NOTHING)) is scenario


def spread(best: float) -> Interval:
    return Interval(0.9 * best, best, 1.1 * best)


@pytest.mark.parametrize(
    ("recommended", "other", "advantage", "verdict"),
    [
        (2.0, 1.0, Interval(1.8, 2.0, 2.2), Verdict.STAYS),
        (1.0, 2.0, Interval(0.4, 0.5, 0.6), Verdict.CHANGES),
        (1.0, 1.0, Interval(0.9, 1.0, 1.1), Verdict.TIED),
        (1.0, 0.0, None, Verdict.STAYS),
        (0.0, 1.0, None, Verdict.CHANGES),
        (0.0, 0.0, None, Verdict.NEITHER),
        (1.0, None, None, Verdict.ALONE),
    ],
)
def test_verdicts(recommended: float, other: float | None, advantage: Interval | None, verdict: Verdict) -> None:
    point = CasePoint(CASES[0], spread(recommended), None if other is None else spread(other), advantage)
    assert point.verdict is verdict


def question(profile: Profile = PROFILE, lengths: Fixed = LENGTHS) -> Question:
    workload = Workload(Poisson(), lengths)
    profiles = dict.fromkeys(Role, profile)
    return Question(profiles, workload, Slo(0.4, 0.1), num_gpus=2, num_requests=30)


@pytest.fixture(scope="module")
def found() -> Sensitivity:
    split = Contender(Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1"), 8.0)
    return sensitivity(question(), split, Contender(Placement.parse("1xC:tp1pp1"), 6.0))


def test_more_work_serves_less(found: Sensitivity) -> None:
    best = {(p.case.changed, p.case.factor): p.recommended.best for p in found.cases}
    asked = best[Changed.NOTHING, 1.0]
    for what in (Changed.PROMPTS, Changed.STEPS):
        assert best[what, 0.8] > asked > best[what, 1.2]
    attainment = [point.recommended.best for point in found.rates]
    assert attainment == sorted(attainment, reverse=True)
    assert [point.share for point in found.rates] == [0.8, 1.0, 1.2]


SPLIT, WHOLE = Placement.parse("2xP:tp1pp1 + 1xD:tp1pp1"), Placement.parse("1xC:tp1pp1")
#: Goodput as asked, and the powers of prompt lengths, output lengths and step times that it falls with.
KNOWN = {SPLIT: (9.0, 0.9, 0.2, 1.0), WHOLE: (2.0, 0.4, 0.7, 1.0)}


def known_goodput_per_s(asked: Scenario, placement: Placement) -> float:
    trace = asked.workload.trace(num_requests=1, seed=0, context_tokens=2048, rate_per_s=1.0)
    role = placement.pools[0].role
    step_s = asked.profiles[role].latency_at(1).decode_s(1, 512) / PROFILE.latency_at(1).decode_s(1, 512)
    goodput, prompts, outputs, steps = KNOWN[placement]
    prompt, output = trace.prompt_tokens[0] / 500, trace.output_tokens[0] / 100
    return float(goodput / prompt**prompts / output**outputs / step_s**steps)


class Known:
    """Answers probes from `known_goodput_per_s`, and notes them."""

    asked: ClassVar[list[tuple[str, Scenario, Probe]]] = []

    def __init__(self, scenario: Scenario, **_: object) -> None:
        self.scenario = scenario

    def run(self, probes: Sequence[Probe], *, stage: str) -> list[Outcome]:
        """Return an attainment that falls with the logarithm of the rate, through the target at the goodput."""
        self.asked.extend((stage, self.scenario, probe) for probe in probes)
        roots = [known_goodput_per_s(self.scenario, probe.placement) for probe in probes]
        return [
            Outcome(Observation(min(1.0, max(0.0, self.scenario.target - math.log(probe.rate_per_s / root)))))
            for probe, root in zip(probes, roots, strict=True)
        ]


def test_placements_of_different_size_are_compared_per_gpu_on_the_searchs_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("experiments.report.sensitivity.Runner", Known)
    monkeypatch.setattr(Known, "asked", [])
    asked = dataclasses.replace(question(lengths=Fixed(500, 100)), num_gpus=3, seed=5)
    found = sensitivity(asked, Contender(SPLIT, 9.0), Contender(WHOLE, 2.0))
    for point in found.cases:
        factor = {what: point.case.factor if point.case.changed is what else 1.0 for what in Changed}
        expected = {
            placement: goodput
            / placement.num_gpus
            / factor[Changed.PROMPTS] ** prompts
            / factor[Changed.OUTPUTS] ** outputs
            / factor[Changed.STEPS] ** steps
            for placement, (goodput, prompts, outputs, steps) in KNOWN.items()
        }
        assert point.recommended.best == pytest.approx(expected[SPLIT], rel=0.01)
        assert point.other is not None
        assert point.other.best == pytest.approx(expected[WHOLE], rel=0.01)
        assert point.advantage is not None
        assert point.advantage.best == pytest.approx(expected[SPLIT] / expected[WHOLE], rel=0.01)
    # At the same load of each GPU.
    probed = [
        (probe.placement, round(probe.rate_per_s, 9), probe.replication)
        for stage, _, probe in Known.asked
        if stage == "rates"
    ]
    assert len(set(probed)) == len(probed)
    assert set(probed) == {
        (placement, round(share * 3.0 * placement.num_gpus, 9), i)
        for share in (0.8, 1.0, 1.2)
        for placement in KNOWN
        for i in range(found.replications)
    }
    for stage, used, probe in Known.asked:
        assert (used.seed, used.target, used.transient) == (5, asked.attainment, True)
        assert probe.replication in range(found.replications)
        assert (probe.warmup, probe.counted, probe.phase) == (0, 30, None)
        if stage in {"rates", Case(Changed.NOTHING).label}:
            assert used.workload is asked.workload


def test_a_changed_assumption_is_the_search_of_another_question(found: Sensitivity) -> None:
    longer = next(point for point in found.cases if point.case == Case(Changed.PROMPTS, 1.2))
    asked = question(lengths=Fixed(614, 16))  # 1.2 times 512
    split, whole = (
        goodput_of(asked, Placement.parse(text)).goodput.rate_per_s
        for text in ("1xP:tp1pp1 + 1xD:tp1pp1", "1xC:tp1pp1")
    )
    assert longer.other is not None
    assert longer.advantage is not None
    assert longer.recommended.best == pytest.approx(split.best / 2, rel=0.04)
    assert longer.other.best == pytest.approx(whole.best, rel=0.04)
    assert longer.advantage.best == pytest.approx(split.best / 2 / whole.best, rel=0.04)


def test_a_case_that_cannot_run_says_why() -> None:
    """Longer prompts may no longer fit a batch that the profile was measured on."""
    limited = dataclasses.replace(
        PROFILE,
        latency={
            tp: dataclasses.replace(model, valid_range=dataclasses.replace(model.valid_range, chunk_tokens=600))  # type: ignore[type-var]
            for tp, model in PROFILE.latency.items()
        },
    )
    alone = sensitivity(
        question(limited, Fixed(560, 16)), Contender(Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1"), 8.0), None
    )
    longer = next(p for p in alone.cases if p.case == Case(Changed.PROMPTS, 1.2))
    assert longer.recommended.best == 0
    assert longer.verdict is Verdict.ALONE
    assert "600" in longer.reasons[0]
    assert alone.other is None
