"""What a search costs: its workers' CPU time counts, their start does not."""

from __future__ import annotations

import hashlib
import math
import time

import pytest

from experiments import measures
from experiments.spent import Spent, timed_processes
from tests.test_measures import CASES, measured

#: Rounds of a hash that take about a quarter of a second, in this process or in a worker that has nothing imported.
ROUNDS = 400_000


def hashed_s() -> float:
    start_s = time.process_time()
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", ROUNDS)
    return time.process_time() - start_s


def test_the_work_of_processes_counts_and_their_start_does_not() -> None:
    one_s = min(hashed_s() for _ in range(3))
    with timed_processes(2) as (executor, spent):
        assert executor is not None
        assert math.isnan(spent.elapsed_s)
        calls = [executor.submit(hashlib.pbkdf2_hmac, "sha256", b"a", b"b", ROUNDS) for _ in range(6)]
        for call in calls:
            call.result()
    assert spent.cpu_s is not None
    # A start takes a second or more of CPU time each.
    assert 0.8 * 6 * one_s < spent.cpu_s < 1.7 * 6 * one_s + 0.3
    with timed_processes(2) as (_, spent):
        pass
    assert spent.cpu_s is not None
    assert spent.cpu_s < 0.5


def test_in_one_process_it_is_that_process() -> None:
    with timed_processes(1) as (executor, spent):
        assert executor is None
        took_s = hashed_s()
        time.sleep(0.3)
    assert spent.cpu_s is not None
    assert took_s <= spent.cpu_s < took_s + 0.2
    assert spent.elapsed_s >= 0.3 + 0.5 * took_s


def test_a_timed_search_says_what_its_processes_took(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(CASES["authors"])
    assert found["cpu_s"] > 0
    assert found["elapsed_s"] > 0

    class Given:
        def __init__(self, jobs: int) -> None:
            self.jobs = jobs

        def __enter__(self) -> tuple[None, Spent]:
            assert self.jobs == 1
            return None, Spent(elapsed_s=7.0, cpu_s=9.0)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(measures, "timed_processes", Given)
    found = measured(CASES["authors"])
    assert (found["elapsed_s"], found["cpu_s"]) == (7, 9)
    assert "cpu_s" not in measured(CASES["authors"].replace("timing: true", "timing: false"))
