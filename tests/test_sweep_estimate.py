"""Estimates of `--dry-run`: their parts against numbers worked out by hand, their ranges against what runs take."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from experiments.estimate import Estimate, estimated
from experiments.measures import measure
from experiments.sweepfile import Task, read_sweep
from tests.test_measures import BASE, CASES, setting

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def tasks_of(*texts: str) -> list[Task]:
    return [Task("", {}, 0, {}, 0, setting(text)) for text in texts]


def work_s(text: str) -> float:
    """Return the middle of what a task takes beside the start of the sweep."""
    one, two = (estimated(tasks_of(*[text] * count), jobs=1) for count in (1, 2))
    return Estimate(two.low_s - one.low_s, two.high_s - one.high_s).middle_s


def test_the_middle_is_the_geometric_mean() -> None:
    assert Estimate(2.0, 8.0).middle_s == 4


def test_parts() -> None:
    run = BASE.replace("requests: 300", "requests: 9000").replace("finite: true", "warmup: 1000")
    pipelined = run.replace("1xD:tp1pp1", "1xD:tp1pp2")
    assert work_s(run) == pytest.approx(0.003 + 10000 * 20e-6)
    assert work_s(run.replace("1xP:tp2pp1", "1xP:tp1pp2")) == pytest.approx(0.003 + 10000 * 20e-6)
    assert work_s(pipelined) == pytest.approx(0.003 + 10000 * 80e-6)
    assert work_s(pipelined + "phase: prefill\n") == pytest.approx(0.003 + 10000 * 4e-6)
    assert work_s(pipelined + "phase: decode\n") == pytest.approx(0.003 + 10000 * 80e-6)
    assert work_s(run + "phase: decode\n") == pytest.approx(0.003 + 10000 * 14e-6)
    # 6000 requests in all at each of eight rates, but at least 8 and at most 40 replications.
    for requests, replications in ((300, 20), (20, 40), (3000, 8)):
        text = CASES["goodput"].replace("requests: 300", f"requests: {requests}")
        assert work_s(text) == pytest.approx(18e-6 * 5 * replications * requests)
    steady = CASES["goodput"].replace("finite: true", "warmup: 9")
    assert work_s(steady) == pytest.approx(18e-6 * 20 * 1300)
    assert work_s(steady.replace("1xD:tp1pp1", "1xD:tp1pp2")) == pytest.approx(55e-6 * 20 * 1300)
    assert work_s(BASE + "measure: search\nsearch: {gpus: 6}\n") == pytest.approx(15)
    assert work_s(CASES["search"]) == pytest.approx(40e-6 * 7 * 40 * 50)
    assert work_s(CASES["prefill step"]) < 0.001


def test_a_candidate_costs_the_same_wherever_it_is() -> None:
    base = BASE + "measure: search\nsearch: {method: authors, mode: disaggregated, affinity: AFFINITY, gpus: GPUS}\n"
    for affinity, gpus, count in (("low", 2, 1), ("low", 4, 9), ("high", 4, 18)):
        text = base.replace("AFFINITY", affinity).replace("GPUS", str(gpus))
        assert work_s(text) == pytest.approx(0.04 * count)
    # Of many pairs their pools, looked at alone, rule out most.
    many = base.replace("AFFINITY", "high").replace("GPUS", "8")
    assert work_s(many) == pytest.approx(0.04 * 60 + 0.004 * (177 - 60))


def test_processes_share_the_work_and_each_search_starts_its_own() -> None:
    run = BASE.replace("requests: 300", "requests: 1000000")
    alone, shared = (estimated(tasks_of(run, run), jobs=jobs) for jobs in (1, 2))
    assert alone.low_s - 1 == pytest.approx(2 * (shared.low_s - 1))
    assert alone.high_s - 4 == pytest.approx(2 * (shared.high_s - 4))
    search = BASE + "measure: search\nsearch: {gpus: 6, jobs: 2}\n"
    found = estimated(tasks_of(search), jobs=1)
    assert (found.low_s, found.high_s) == pytest.approx((1 + 1 + 7.5 / 3, 4 + 4 + 7.5 * 3))


def test_nothing_to_do_takes_the_start() -> None:
    assert estimated([], jobs=3) == Estimate(1.0, 4.0)


def test_figure_12_takes_a_few_minutes() -> None:
    """Three times 66 CPU s in two processes, and the start of thirty pairs of them."""
    found = estimated(read_sweep(EXPERIMENTS / "fig12.yaml").tasks, jobs=1)
    assert found.low_s < 3 * 66 / 2
    assert found.high_s > 3 * 66 / 2 + 30 * 4
    assert 60 < found.middle_s < 240


@pytest.mark.parametrize(
    "case", ["steady", "colocated", "prefill", "decode", "pipelined", "goodput", "search", "authors"]
)
def test_runs_take_what_is_said(case: str) -> None:
    """CPU time, the least of some runs, within twice the range: machines differ, and this one is shared."""
    text = CASES["steady"].replace("1xD:tp1pp1", "1xD:tp1pp2") if case == "pipelined" else CASES[case]
    if case in ("steady", "colocated", "prefill", "decode", "pipelined"):
        text = text.replace("requests: 300\n", "requests: 2000\n")
    asked = setting(text)
    one, two = (estimated(tasks_of(*[text] * count), jobs=1) for count in (1, 2))
    low_s, high_s = (two.low_s - one.low_s) / 2, (two.high_s - one.high_s) * 2
    took_s: list[float] = []
    while len(took_s) < 3 and not (took_s and low_s < min(took_s) < high_s):
        start_s = time.process_time()
        measure(asked, seed=0)
        took_s.append(time.process_time() - start_s)
    assert low_s < min(took_s) < high_s
