"""Estimates of how long a sweep takes, from what runs have cost, as ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from dsim.pools import Role
from experiments.measures import question_of
from experiments.settings import Measure, Method, Setting
from experiments.sweepfile import Task
from placement.search import Affinity, candidates, replications_of

#: CPU seconds of one request in a run that keeps everything, and in a goodput's probe; then where the instances that
#: decode are pipelined, which takes an event a step. Measured with the shipped files and their quick variants on a busy
#: core of 2023: 7 to 40 µs in runs and 15 to 29 in probes; pipelined 50 to 125 and 49 to 68.
_REQUEST_S, _PROBED_S = 20e-6, 18e-6
_PIPELINED_S, _PIPELINED_PROBED_S = 80e-6, 55e-6
#: Of prefill alone (3 to 5 µs), of decode alone (13 to 15), and of any task.
_PREFILL_S, _DECODE_S, _TASK_S = 4e-6, 14e-6, 0.003
#: A goodput takes 8 to 47 steady runs, each with a warm-up of so many requests; of finite ones 2 to 8 a replication.
_GOODPUT_RUNS, _WARMUP, _FINITE_RUNS = 20, 1000, 5
#: A search compares the best few candidates; of finite runs it takes 3 to 12 a replication in all. They were of 50 and
#: 100 requests where this was measured, so short that a request costs more: 29 to 88 µs.
_SEARCH_RUNS, _SEARCHED_S = 7, 40e-6
#: A candidate, as DistServe's settings look at it (one to five runs of 300 requests), and one of very many pairs with
#: high affinity, most of which their pools rule out; a GPU of a search of steady runs.
_CANDIDATE_S, _RULED_OUT_S, _GPU_S = 0.04, 0.004, 2.5
#: Pairs from whose number on that is so.
_MANY_PAIRS = 60
#: Processes that start, and import what they need.
_START_S = 2.0
#: By how much each may be off, both ways: load, memory pressure and the machine.
_OFF: Final = {
    Measure.SIMULATE: 2.5,
    Measure.GOODPUT: 3.0,
    Measure.SEARCH: 3.0,
    Measure.STEP: 3.0,
    Measure.QUEUEING: 3.0,
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long something takes, seconds: between these, and about their geometric mean."""

    low_s: float
    high_s: float

    @property
    def middle_s(self) -> float:
        """The geometric mean."""
        return math.sqrt(self.low_s * self.high_s)


def estimated(tasks: Sequence[Task], *, jobs: int) -> Estimate:
    """Return how long tasks take in so many processes."""
    known = {id(setting): _cost(setting) for setting in {id(task.setting): task.setting for task in tasks}.values()}
    costs = [known[id(task.setting)] for task in tasks]
    # The processes of a search are its own, beside those of the sweep; what is off is so for all tasks alike.
    low_s = math.fsum(cost.low_s for cost in costs) / jobs + _START_S / 2
    return Estimate(low_s, math.fsum(cost.high_s for cost in costs) / jobs + _START_S * 2)


def _cost(setting: Setting) -> Estimate:
    work_s, start_s = _work_s(setting), 0.0
    inner = 1 if setting.search is None else setting.search.jobs or 1
    if setting.measure in {Measure.GOODPUT, Measure.SEARCH} and inner > 1:
        work_s, start_s = work_s / inner, _START_S
    off = _OFF[setting.measure]
    return Estimate(work_s / off + start_s / 2, work_s * off + start_s * 2)


def _work_s(setting: Setting) -> float:
    """Return the CPU seconds of one task, about."""
    traffic, asked = setting.traffic, setting.search
    if setting.measure is Measure.SIMULATE:
        return _TASK_S + _request_s(setting) * (traffic.requests + traffic.warmup)
    if setting.measure is Measure.GOODPUT and asked is not None:
        finite = traffic.requests if traffic.finite else asked.requests
        each_s = _PIPELINED_PROBED_S if _decodes_pipelined(setting) else _PROBED_S
        if finite is None:
            return each_s * _GOODPUT_RUNS * (traffic.requests + _WARMUP)
        return each_s * _FINITE_RUNS * _replications(setting, finite) * finite
    if setting.measure is Measure.SEARCH and asked is not None:
        if asked.method is Method.AUTHORS:
            count = len(candidates(question_of(setting, seed=0)))
            looked_at = count if asked.affinity is Affinity.LOW else min(count, _MANY_PAIRS)
            return _CANDIDATE_S * looked_at + _RULED_OUT_S * (count - looked_at)
        if asked.requests is None:
            return _GPU_S * asked.cluster.num_gpus
        return _SEARCHED_S * _SEARCH_RUNS * _replications(setting, asked.requests) * asked.requests
    return _TASK_S / 10


def _request_s(setting: Setting) -> float:
    """Return the CPU seconds of one request of a run that keeps everything."""
    if setting.phase is Role.PREFILL:
        return _PREFILL_S
    if _decodes_pipelined(setting):
        return _PIPELINED_S
    return _REQUEST_S if setting.phase is None else _DECODE_S


def _decodes_pipelined(setting: Setting) -> bool:
    """Whether the instances that decode have several stages."""
    placement = setting.placement
    return placement is not None and placement.pools[-1].parallelism.pp > 1


def _replications(setting: Setting, requests: int) -> int:
    return replications_of(replace(question_of(setting, seed=0), num_requests=requests))[0]
