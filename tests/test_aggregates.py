"""Aggregates of a run are those of its requests, in a memory that does not grow with their number."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.aggregates import Aggregates
from dsim.errors import InputError
from dsim.metrics import Distribution
from dsim.options import Options, Window
from dsim.pools import Placement, Policy, Role
from dsim.profile import BatchLimits
from dsim.simulate import aggregate, simulate
from dsim.sketch import RELATIVE_ERROR, Sketch
from dsim.slo import Slo
from dsim.workload import ClosedLoop, Fixed, Poisson, Uniform, Workload
from tests.reference.systems import every_role, make_profile
from tests.test_twin import System, systems

SLO = Slo(ttft_s=0.06, tpot_s=0.014, e2e_s=0.7)
_DISTRIBUTIONS = {"ttft_s", "tpot_s", "itl_s", "e2e_s"}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare summaries: percentiles within the error that is promised, means to rounding, the rest exactly."""
    assert list(found) == [*expected, "percentile_error"]
    for key, value in expected.items():
        if key in _DISTRIBUTIONS:
            for name, number in value.items():
                error = 1e-12 if name == "mean" else RELATIVE_ERROR
                assert found[key][name] == pytest.approx(number, rel=error, abs=1e-9, nan_ok=True), (key, name)
        elif key in {"ttft_parts_s", "utilization"}:
            assert found[key] == pytest.approx(value, rel=1e-12, abs=1e-12, nan_ok=True)
        elif isinstance(value, dict):
            assert {k: v for k, v in found[key].items() if v == v} == {k: v for k, v in value.items() if v == v}
        else:
            assert found[key] == value or (found[key] != found[key] and value != value), key


@given(systems(dyadic=False), st.integers(0, 5), st.sampled_from([None, 7, 25]), st.sampled_from([None, *Role]))
@settings(max_examples=60)
def test_aggregates_are_those_of_the_requests(
    system: System, warmup: int, counted: int | None, phase: Role | None
) -> None:
    if system.placement.is_colocated or phase is Role.COLOCATED:
        phase = None
    window = Window(warmup=warmup, counted=counted)
    options = replace(system.options, check=False)
    asked: dict[str, Any] = {"profiles": system.profiles, "options": options, "window": window, "phase": phase}
    expected = simulate(system.placement, system.trace, **asked)
    found = aggregate(system.placement, system.trace, slo=SLO, **asked)
    assert_same(found.summary(), expected.summary(SLO))
    assert (found.events, found.elapsed_s, found.drained) == (expected.events, expected.elapsed_s, expected.drained)


@given(systems(dyadic=False), st.integers(1, 6), st.integers(0, 10))
@settings(max_examples=20)
def test_aggregates_of_a_closed_loop(system: System, users: int, warmup: int) -> None:
    loop = ClosedLoop(users, Uniform(20, 30, 0.1), 60 + users, stagger_s=0.01, think_time_s=0.02)
    asked: dict[str, Any] = {
        "profiles": system.profiles,
        "options": replace(system.options, check=False),
        "window": Window(warmup=warmup),
    }
    expected = simulate(system.placement, loop, **asked)
    assert_same(aggregate(system.placement, loop, slo=SLO, **asked).summary(), expected.summary(SLO))


PROFILE = make_profile(
    prefill=(8.0, 0.5, 0.0),
    decode=(4.0, 1 / 64, 0.5),
    limits={Role.PREFILL: BatchLimits(256, 8), Role.DECODE: BatchLimits(requests=64)},
)
WORKLOAD = Workload(Poisson(), Uniform(60, 12, 0.2))
DRAW: dict[str, Any] = {"seed": 4, "context_tokens": PROFILE.model.context_tokens}


def of_many(placement: Placement, *, num_requests: int, rate_per_s: float) -> Aggregates:
    blocks = WORKLOAD.finite(num_requests=num_requests, rate_per_s=rate_per_s, **DRAW)
    return aggregate(placement, blocks, profiles=every_role(PROFILE), slo=SLO, num_requests=num_requests)


@pytest.mark.parametrize(
    ("text", "rate_per_s", "saturation"),
    [
        ("2xP:tp1pp1 + 2xD:tp1pp1", 30.0, "stable"),
        ("1xP:tp1pp1 + 1xD:tp1pp1", 70.0, "overloaded"),
        ("2xC:tp1pp2", 30.0, "stable"),
    ],
)
def test_rows_are_given_again_and_nothing_is_lost(text: str, rate_per_s: float, saturation: str) -> None:
    """Twice as many requests as are put into the statistics at once."""
    placement = Placement.parse(text, policy=Policy.PREFILL_FIRST)
    requests, warmup = 9000, 500
    asked: dict[str, Any] = {"profiles": every_role(PROFILE), "window": Window(warmup=warmup, counted=requests)}
    draw: dict[str, Any] = {"num_requests": requests + warmup, "rate_per_s": rate_per_s, **DRAW}
    expected = simulate(placement, WORKLOAD.steady(**draw), **asked)
    found = aggregate(placement, WORKLOAD.steady(**draw), slo=SLO, **asked)
    assert_same(found.summary(), expected.summary(SLO))
    assert found.saturation.value == saturation
    assert (0 < found.attainment.both < 1) == (saturation == "stable")


def test_blocks_hold_the_requests_of_a_trace() -> None:
    whole = WORKLOAD.trace(num_requests=9001, rate_per_s=3.0, **DRAW)
    blocks = list(WORKLOAD.finite(num_requests=9001, rate_per_s=3.0, **DRAW))
    assert len(blocks) > 2
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "cached_prompt_tokens"):
        np.testing.assert_array_equal(np.concatenate([getattr(block, name) for block in blocks]), getattr(whole, name))


def test_memory_does_not_grow_with_the_requests() -> None:
    placement = Placement.parse("2xP:tp1pp1 + 2xD:tp1pp1")
    peaks = []
    for requests in (8_000, 20_000):
        tracemalloc.start()
        of_many(placement, num_requests=requests, rate_per_s=30.0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
    # Whole columns of 20,000 requests alone take this much.
    assert peaks[1] < 20_000 * (11 * 8 + 3 * 4 + 1) + 5_000_000


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"options": Options(check=True)}, "options: check=True needs every request"),
        ({"options": Options(log_steps=True)}, "options: log_steps=True needs every request"),
        ({"window": Window(counted=5, stop_slo=SLO, max_misses=2)}, "window: max_misses cannot end a run"),
        ({}, "window: counted must be given for an endless source"),
        ({"window": Window(counted=5000)}, "window: counted=5000 is 5000 with the warm-up, of a source that ended"),
    ],
)
def test_refuses_what_it_cannot_do(asked: dict[str, Any], message: str) -> None:
    blocks = islice(WORKLOAD.blocks(rate_per_s=5.0, block=100, **DRAW), 3)
    with pytest.raises(InputError) as caught:
        aggregate(Placement.parse("1xC:tp1pp1"), blocks, profiles=PROFILE, **asked)
    assert str(caught.value).startswith(message)


def test_a_run_without_requests_of_its_own() -> None:
    """Everything rejected: nothing is known, and everybody missed."""
    workload = Workload(Poisson(), Fixed(1500, 20))
    profile = make_profile(kv_tokens=400)
    trace = workload.trace(num_requests=50, rate_per_s=5.0, seed=0, context_tokens=4096)
    asked: dict[str, Any] = {"profiles": every_role(profile)}
    placement = Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1")
    found = aggregate(placement, trace, slo=SLO, **asked)
    assert_same(found.summary(), simulate(placement, trace, **asked).summary(SLO))
    assert (found.rejected, found.attainment.both) == (50, 0.0)


# Sketches


@given(
    st.lists(st.floats(1e-9, 1e9, allow_subnormal=False), min_size=1, max_size=300),
    st.lists(st.integers(1, 4), min_size=300, max_size=300),
    st.integers(1, 5),
)
def test_percentiles_of_a_sketch_are_within_its_error(values: list[float], weights: list[int], parts: int) -> None:
    sample, counts = np.array(values), np.array(weights[: len(values)])
    sketch = Sketch()
    for part in range(parts):
        sketch.add(sample[part::parts], counts[part::parts])
    found, expected = sketch.distribution(), Distribution.of(np.repeat(sample, counts))
    assert found.mean == pytest.approx(expected.mean, rel=1e-12)
    for name in ("p50", "p90", "p95", "p99"):
        assert abs(getattr(found, name) - getattr(expected, name)) <= RELATIVE_ERROR * getattr(expected, name)


def test_a_sketch_of_nothing_of_nan_and_of_zeros() -> None:
    sketch = Sketch()
    sketch.add(np.array([math.nan]))
    assert all(math.isnan(value) for value in sketch.distribution().to_dict().values())
    sketch.add(np.array([0.0, math.nan, 0.0, 1e-15]))
    assert sketch.distribution().p50 == 0.0
    assert sketch.distribution().p99 <= 1e-9


def test_statistics_of_long_arrays_leave_other_cores_alone() -> None:
    """A BLAS would have its threads on all cores spin; with one core there are none to see."""
    code = """
import time
import numpy as np
from dsim.metrics import weighted_distribution
from dsim.recorder import Gaps
from dsim.sketch import Sketch

gaps, sketch = Gaps(), Sketch()
gaps.add_run(0.01, 1e-9, 40_000, 3)
time.sleep(0.2)
process_s, thread_s = time.process_time(), time.thread_time()
for _ in range(20):
    sketch.add(*gaps.expanded())
    weighted_distribution(gaps)
process_s, thread_s = time.process_time() - process_s, time.thread_time() - thread_s
print(f"{process_s / thread_s:.2f}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.2
