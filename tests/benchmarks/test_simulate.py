"""CPU seconds of simulations: pytest tests/benchmarks --benchmark-enable.

The clock is CPU time of this process; nothing is asserted about it. `-k million` picks those that take long (`-k
a_million`, `-k ten_million`: one of them), `-k 'not million'` those that take seconds. Memory is the largest resident
set of the process so far, so run each million alone to know its own.
"""

from __future__ import annotations

import resource
import sys
import time

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from dsim.aggregates import Aggregates
from dsim.options import Options
from dsim.pools import Placement, Policy
from dsim.profile import Profile
from dsim.result import Result
from dsim.simulate import aggregate, simulate
from dsim.slo import Slo
from dsim.trace import Trace
from dsim.workload import Poisson, Workload, preset
from profiles.shipped import find_profile

pytestmark = pytest.mark.benchmark(timer=time.process_time)

PAPER = Placement.parse("1xP:tp2pp1 + 1xD:tp1pp1")
MANY = Placement.parse("32xP:tp2pp1 + 32xD:tp1pp1")


def profile_of(engine: str) -> Profile:
    return find_profile("facebook/opt-13b", "a100-80g", engine=engine)


def requests(profile: Profile, *, rate_per_s: float, num_requests: int) -> Trace:
    """Return Poisson arrivals with ShareGPT lengths."""
    workload = Workload(Poisson(), preset("sharegpt"))
    context_tokens = profile.model.context_tokens
    return workload.trace(rate_per_s=rate_per_s, num_requests=num_requests, seed=0, context_tokens=context_tokens)


def measure(
    benchmark: BenchmarkFixture,
    placement: Placement,
    *,
    rate_per_s: float,
    num_requests: int,
    engine: str = "distserve",
    options: Options = Options(),
    rounds: int = 3,
) -> None:
    """Simulate a few times and note CPU seconds, events and memory beside pytest-benchmark's own statistics."""
    profile = profile_of(engine)
    trace = requests(profile, rate_per_s=rate_per_s, num_requests=num_requests)
    spent_s: list[float] = []

    def run() -> Result:
        start_s = time.process_time()
        result = simulate(placement, trace, profiles=profile, options=options)
        spent_s.append(time.process_time() - start_s)
        return result

    result = benchmark.pedantic(run, rounds=rounds, iterations=1)  # type: ignore[no-untyped-call]
    note(benchmark, min(spent_s), result, num_requests)


def note(benchmark: BenchmarkFixture, spent_s: float, run: Result | Aggregates, num_requests: int) -> None:
    """Note what a run took."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    benchmark.extra_info.update(
        cpu_s=spent_s,
        cpu_us_per_request=1e6 * spent_s / num_requests,
        events_per_request=run.events / num_requests,
        saturation=run.saturation.value,
        # Kilobytes on Linux, bytes on macOS.
        peak_memory_mib=peak / (2**20 if sys.platform == "darwin" else 2**10),
    )


def test_a_million_requests(benchmark: BenchmarkFixture) -> None:
    measure(benchmark, PAPER, rate_per_s=4.0, num_requests=1_000_000, rounds=1)


@pytest.mark.parametrize("itl", [True, False], ids=["itl", "plain"])
@pytest.mark.parametrize("num_requests", [100_000, 1_000_000, 10_000_000], ids=["tenth", "whole", "ten_million"])
def test_aggregates_of_millions_through_64_instances(benchmark: BenchmarkFixture, num_requests: int, itl: bool) -> None:
    """The requests are drawn meanwhile: their time is in it. ITL is about every token, the rest about requests."""
    options = Options(track_itl=itl)
    profile = profile_of("distserve")
    workload = Workload(Poisson(), preset("sharegpt"))
    draw = {"num_requests": num_requests, "seed": 0, "context_tokens": profile.model.context_tokens}
    spent_s: list[float] = []

    def run() -> Aggregates:
        start_s = time.process_time()
        blocks = workload.finite(rate_per_s=128.0, **draw)
        slo = Slo(ttft_s=0.2, tpot_s=0.1)
        found = aggregate(MANY, blocks, profiles=profile, slo=slo, num_requests=num_requests, options=options)
        spent_s.append(time.process_time() - start_s)
        return found

    found = benchmark.pedantic(run, rounds=1, iterations=1)  # type: ignore[no-untyped-call]
    note(benchmark, min(spent_s), found, num_requests)


@pytest.mark.parametrize("rate_per_s", [1.0, 4.0, 8.0])
def test_the_papers_placement(benchmark: BenchmarkFixture, rate_per_s: float) -> None:
    measure(benchmark, PAPER, rate_per_s=rate_per_s, num_requests=20_000)


def test_without_gaps_between_tokens(benchmark: BenchmarkFixture) -> None:
    measure(benchmark, PAPER, rate_per_s=4.0, num_requests=20_000, options=Options(track_itl=False))


def test_with_its_laws_checked(benchmark: BenchmarkFixture) -> None:
    measure(benchmark, PAPER, rate_per_s=4.0, num_requests=20_000, options=Options(check=True))


def test_three_hundred_requests(benchmark: BenchmarkFixture) -> None:
    """The run of the search at the authors' settings."""
    measure(benchmark, PAPER, rate_per_s=6.0, num_requests=300, options=Options(track_itl=False), rounds=20)


def test_a_thousand_requests(benchmark: BenchmarkFixture) -> None:
    """A short run of a search."""
    measure(benchmark, PAPER, rate_per_s=6.0, num_requests=1000, options=Options(track_itl=False), rounds=10)


def test_pipelined_decode(benchmark: BenchmarkFixture) -> None:
    measure(benchmark, Placement.parse("1xP:tp2pp1 + 1xD:tp1pp2"), rate_per_s=6.0, num_requests=10_000)


def test_sixty_four_instances(benchmark: BenchmarkFixture) -> None:
    measure(benchmark, MANY, rate_per_s=128.0, num_requests=20_000)


def test_several_instances(benchmark: BenchmarkFixture) -> None:
    measure(benchmark, Placement.parse("3xP:tp2pp1 + 2xD:tp1pp1"), rate_per_s=8.0, num_requests=10_000)


@pytest.mark.parametrize("policy", Policy)
def test_colocated(benchmark: BenchmarkFixture, policy: Policy) -> None:
    placement = Placement.parse("1xC:tp1pp1", policy=policy)
    measure(benchmark, placement, rate_per_s=1.0, num_requests=5_000, engine="vllm")


def test_pipelined_colocated(benchmark: BenchmarkFixture) -> None:
    placement = Placement.parse("1xC:tp1pp2", policy=Policy.CHUNKED)
    measure(benchmark, placement, rate_per_s=2.0, num_requests=5_000, engine="vllm")


def test_statistics_of_a_hundred_thousand_requests(benchmark: BenchmarkFixture) -> None:
    """What comes after a run: the summary with its percentiles."""
    profile = profile_of("distserve")
    trace = requests(profile, rate_per_s=4.0, num_requests=100_000)
    result = simulate(PAPER, trace, profiles=profile)
    benchmark.pedantic(result.summary, args=(Slo(ttft_s=0.2, tpot_s=0.1),), rounds=3, iterations=1)  # type: ignore[no-untyped-call]
