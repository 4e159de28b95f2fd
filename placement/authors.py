"""The search as DistServe's authors set it up, for speed comparisons only: it ranks on a transient of one seed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Final

from dsim.pools import Placement, Role
from placement import bounds, feasibility
from placement.probe import Outcome, Probe
from placement.runner import Runner
from placement.search import Question, candidates, case, scenario

#: Requests of one run, and rates probed for one candidate.
NUM_REQUESTS: Final = 300
RATE_PROBES: Final = 5
#: Candidates examined side by side. A constant, so that the number of workers changes nothing.
_ABREAST: Final = 4
#: So many times as many pairs as pools make it worth to look at every pool alone first.
_MANY: Final = 3
#: Share of a rate that a decode pool must sustain alone to be worth a joint run: prompts come to it less evenly there
#: than behind a prefill pool.
_ALONE: Final = 0.9


@dataclass(frozen=True, slots=True)
class QuickTrial:
    """What five short runs say of a candidate.

    Args:
        low_per_gpu_per_s: highest rate per GPU that met the target, 0 if none did.
        high_per_gpu_per_s: lowest one that did not.
        probes: joint runs made; one if the candidate failed at the rate of the best before it, none if one of its pools
            alone does.
    """

    placement: Placement
    low_per_gpu_per_s: float
    high_per_gpu_per_s: float
    probes: int


@dataclass(slots=True)
class _Bisection:
    """The largest rate per GPU of one candidate, narrowed probe by probe.

    Args:
        best: the rate of the best candidate before it, tried first.
        phase: the pool that is looked at alone.
    """

    placement: Placement
    high: float
    best: float = 0.0
    phase: Role | None = None
    low: float = 0.0
    probes: int = 0
    beaten: bool = False

    @property
    def done(self) -> bool:
        """Whether nothing is left to probe."""
        return self.beaten or self.probes >= RATE_PROBES or self.high <= 0

    @property
    def rate(self) -> float:
        """The rate per GPU to probe next."""
        return self.best if self.probes == 0 and 0 < self.best < self.high else (self.low + self.high) / 2

    @property
    def probe(self) -> Probe:
        """The run that probes it; it stops when too many requests have missed."""
        return Probe(
            self.placement, self.rate * self.placement.num_gpus, 0, 0, NUM_REQUESTS, slack=0.0, phase=self.phase
        )

    def tell(self, outcome: Outcome) -> None:
        """Note what the probe saw."""
        rate = self.rate
        self.probes += 1
        if outcome.failure is None and not outcome.observation.stopped_early:
            self.low = rate
        else:
            self.high = rate
            self.beaten = rate <= self.best


def authors_settings(question: Question, *, executor: Executor | None = None) -> tuple[QuickTrial, ...]:
    """Return every candidate that can run, best first, as 300 requests, five rates and one seed rank them.

    The rates of a candidate are bisected. The first is that of the best candidate so far: one that fails there cannot
    be the best, and its other four probes are saved. Where there are many more pairs than pools, every pool is bisected
    alone first, as in DistServe's Algorithm 1: pairs one of whose pools fails alone at the best's rate are not run.

    Args:
        executor: runs the probes of a few candidates at a time; None: here. The answer is the same.
    """
    question = replace(question, num_requests=NUM_REQUESTS)
    known, runner = case(question), Runner(scenario(question), executor=executor)
    cluster, longest = question.cluster, known.sample.longest
    running = []
    for placement in candidates(question):
        if not feasibility.reasons(placement, profiles=question.used_profiles, cluster=cluster, longest=longest):
            analytic = bounds.upper_bounds(placement, known)
            # A finite run may meet limits at rates at which they could not be met for long.
            capacity = next(b.rate_per_s for b in analytic if not b.by_limits) / placement.num_gpus
            running.append((capacity * bounds.headroom(placement, known), capacity, placement))
    alone = _alone([placement for _, _, placement in running], known, runner)
    if alone:
        running = [(min(2 * capacity, alone[placement]), capacity, placement) for _, capacity, placement in running]
    running.sort(key=lambda item: (-item[0], item[2].num_gpus, item[2].label))
    best, found = 0.0, []
    while running:
        batch: list[_Bisection] = []
        while running and len(batch) < _ABREAST:
            _, capacity, placement = running.pop(0)
            # A finite run may outlive its capacity for a while.
            high = alone.get(placement, 2 * capacity)
            if alone and high <= best:
                found.append(QuickTrial(placement, 0.0, high, 0))
            else:
                batch.append(_Bisection(placement, min(high, 2 * capacity), best))
        _bisect(batch, runner)
        best = max([best, *(bisection.low for bisection in batch)])
        found += [QuickTrial(b.placement, b.low, b.high, b.probes) for b in batch]
    return tuple(sorted(found, key=_rank))


def _bisect(batch: Sequence[_Bisection], runner: Runner) -> None:
    while active := [bisection for bisection in batch if not bisection.done]:
        outcomes = runner.run([bisection.probe for bisection in active], stage="bisecting")
        for bisection, outcome in zip(active, outcomes, strict=True):
            bisection.tell(outcome)


def _alone(placements: Sequence[Placement], known: bounds.Case, runner: Runner) -> dict[Placement, float]:
    """Return rates per GPU that one of the pools of each pair does not sustain alone; none where pairs are few."""
    pairs = [placement for placement in placements if not placement.is_colocated]
    pools = {pool: placement for placement in pairs for pool in placement.pools}
    if len(pairs) < _MANY * len(pools):
        return {}
    bisections = {}
    for pool, placement in pools.items():
        per_gpu = 2 * bounds.pool_capacity(pool, known).rate_per_s / placement.num_gpus
        bisections[pool] = _Bisection(placement, per_gpu, phase=pool.role)
    _bisect(list(bisections.values()), runner)
    failed = {pool: b.high * b.placement.num_gpus for pool, b in bisections.items()}
    return {
        placement: min(failed[placement.pools[0]], failed[placement.pools[1]] / _ALONE) / placement.num_gpus
        for placement in pairs
    }


def _rank(trial: QuickTrial) -> tuple[float, float, int, str]:
    return (-trial.low_per_gpu_per_s, -trial.high_per_gpu_per_s, trial.placement.num_gpus, trial.placement.label)


def best_of(trials: Sequence[QuickTrial]) -> Placement | None:
    """Return the winner, None if no candidate met the target at any rate."""
    return trials[0].placement if trials and trials[0].low_per_gpu_per_s > 0 else None
