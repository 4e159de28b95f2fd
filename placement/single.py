"""The goodput of one placement that is given, or of one of its pools alone."""

from __future__ import annotations

import math
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Final

from dsim.errors import InputError
from dsim.pools import Placement, Role
from placement import bounds
from placement.goodput import Ask, Estimator, Goodput, Sampling
from placement.mixes import case_of
from placement.probe import Outcome, Probe
from placement.race import Horizon
from placement.result import Operation
from placement.runner import Runner
from placement.search import Question, case, horizon, operation_of, replications_of, scenario
from placement.statistics import Interval

#: Where to look first, as a share of the capacity that the bounds leave.
_START: Final = 0.8


@dataclass(frozen=True, slots=True)
class Single:
    """What one placement sustains.

    Args:
        num_gpus: of the placement, or of its pool that was looked at alone.
        operation: how it runs at the highest rate that it was seen to sustain; None where it sustains none, or for one
            pool alone.
    """

    goodput: Goodput
    num_gpus: int
    operation: Operation | None
    probes: int
    requests: int


def goodput_of(
    question: Question,
    placement: Placement,
    *,
    phase: Role | None = None,
    counted: int | None = None,
    executor: Executor | None = None,
) -> Single:
    """Return the largest rate that a placement sustains within the question's limits.

    The runs are the longest on which a search compares placements, shorter than those behind its intervals; nothing is
    compared with anything.

    Args:
        question: its space, mode and `top` are not used.
        phase: look at this pool alone, under its own limit.
        counted: requests counted in one run; None: as many as a search compares placements on.

    Raises:
        InputError: a run broke off.
    """
    known, runs = case_of(placement, case(question), question.used_mixes, {}), scenario(question)
    pools = [pool for pool in placement.pools if phase in {None, pool.role}]
    capacity = min(bounds.pool_capacity(pool, known).rate_per_s for pool in pools)
    limit = math.inf
    if phase is None and not runs.transient:
        limit = bounds.upper_bounds(placement, known)[0].rate_per_s
    start = _START * (capacity if math.isfinite(capacity) else 1.0)
    if phase is None:
        start *= bounds.headroom(placement, known)
    run = _run(question, counted)
    replications = replications_of(question)
    sampling = Sampling(
        locate=replications[0],
        replications=replications[0],
        max_replications=replications[1],
        confidence=question.confidence,
    )
    if not runs.transient:
        # Finite runs are as many as their length asks for, whatever the precision.
        sampling = replace(sampling, precision=question.precision)
    estimator = Estimator(question.attainment, start, limit, sampling)
    runner = Runner(runs, executor=executor)
    outcomes: dict[Ask, Outcome] = {}
    while limit > 0 and (asks := estimator.ask()):
        probes = [
            Probe(placement, ask.rate_per_s, ask.replication, run.warmup, run.counted, run.tail, phase=phase)
            for ask in asks
        ]
        for ask, outcome in zip(asks, runner.run(probes, stage="estimating"), strict=True):
            if outcome.failure is not None:
                raise InputError("goodput", f"could not be found: {outcome.failure}", value=placement.label)
            outcomes[ask] = outcome
            estimator.tell(ask, outcome.observation)
    goodput = estimator.result or Goodput(Interval(0.0, 0.0, 0.0), (), (0.0, 0.0))
    return Single(
        goodput=goodput,
        num_gpus=sum(pool.num_gpus for pool in pools),
        operation=operation_of(placement, goodput, outcomes) if phase is None else None,
        probes=runner.probes,
        requests=runner.requests,
    )


def _run(question: Question, counted: int | None) -> Horizon:
    run = horizon(question)
    if question.num_requests is not None:
        return run
    return replace(run, counted=max(run.counted, counted or 0), tail=run.tail // 2)
