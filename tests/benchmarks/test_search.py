"""How much searches cost; run by name: pytest tests/benchmarks --benchmark-enable."""

from __future__ import annotations

import os
import time

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from dsim.pools import Role
from dsim.slo import Slo
from dsim.workload import Poisson, Workload, preset
from placement.authors import authors_settings, best_of
from placement.search import Affinity, Mode, Question, search
from profiles.shipped import find_profile


def question(model: str = "opt-13b", **changes: object) -> Question:
    distserve, vllm = (find_profile(f"facebook/{model}", "a100-80g", engine=name) for name in ("distserve", "vllm"))
    profiles = {Role.PREFILL: distserve, Role.DECODE: distserve, Role.COLOCATED: vllm}
    return Question(profiles, Workload(Poisson(), preset("sharegpt")), **changes)  # type: ignore[arg-type]


@pytest.mark.benchmark(timer=time.process_time)
def test_authors_settings(benchmark: BenchmarkFixture) -> None:
    """OPT-13B on 4 GPUs at the authors' settings, CPU seconds; their simulator takes 31 to 39."""
    asked = question(slo=Slo(0.2, 0.1), num_gpus=4, mode=Mode.DISAGGREGATED)
    trials = benchmark(authors_settings, asked)
    assert str(best_of(trials)) == "1xP:tp2pp1 + 1xD:tp1pp1"


@pytest.mark.benchmark(timer=time.process_time)
def test_authors_settings_over_nodes(benchmark: BenchmarkFixture) -> None:
    """OPT-66B on 4 x 8 GPUs, low affinity, at the authors' settings, CPU seconds; their simulator takes 348."""
    slo = Slo(0.4, 0.1)
    asked = question("opt-66b", slo=slo, num_gpus=32, affinity=Affinity.LOW, mode=Mode.DISAGGREGATED)
    trials = benchmark(authors_settings, asked)
    assert str(best_of(trials)) == "1xP:tp4pp4 + 1xD:tp2pp4"


@pytest.mark.benchmark(timer=time.perf_counter)
def test_default_question(benchmark: BenchmarkFixture) -> None:
    """The README's question, wall seconds on the cores there are."""
    asked = question(slo=Slo(0.4, 0.1))
    result = benchmark.pedantic(search, (asked,), {"jobs": os.cpu_count() or 1}, rounds=1)  # type: ignore[no-untyped-call]
    benchmark.extra_info.update(probes=result.probes, requests=result.requests)
    assert result.is_feasible
